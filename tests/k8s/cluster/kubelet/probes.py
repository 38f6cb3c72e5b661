"""Startup, readiness and liveness of a container, as its probes say."""

import http.client
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tests.k8s.cluster.api import Json

ProbeKind = Literal["startupProbe", "readinessProbe", "livenessProbe"]


def port_of(container: Json, port: int | str) -> int:
    if isinstance(port, int):
        return port
    return int(next(each["containerPort"] for each in container["ports"] if each.get("name") == port))


def http_get(container: Json, ip: str, request: Json, timeout_s: float) -> bool:
    connection = http.client.HTTPConnection(ip, port_of(container, request["port"]), timeout=timeout_s)
    try:
        connection.request("GET", request.get("path", "/"))
        return 200 <= connection.getresponse().status < 400
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def execute(network: str, command: list[str], values: Mapping[str, str], timeout_s: float) -> bool:
    try:
        done = subprocess.run(
            ["ip", "netns", "exec", network, *command],
            env=dict(values),
            capture_output=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


@dataclass
class ProbeCount:
    """Answers in a row of one probe, and when it is asked next."""

    probe: Json
    next_s: float
    num_good: int = 0
    num_bad: int = 0

    def is_due(self) -> bool:
        return time.monotonic() >= self.next_s

    def count(self, is_good: bool) -> None:
        self.num_good, self.num_bad = (self.num_good + 1, 0) if is_good else (0, self.num_bad + 1)
        self.next_s = time.monotonic() + float(self.probe.get("periodSeconds") or 10)

    @property
    def has_succeeded(self) -> bool:
        return self.num_good >= int(self.probe.get("successThreshold") or 1)

    @property
    def has_failed(self) -> bool:
        return self.num_bad >= int(self.probe.get("failureThreshold") or 3)


@dataclass
class ContainerHealth:
    """What the probes of one start of a container have said so far."""

    container: Json
    ip: str
    network: str
    values: Mapping[str, str]
    is_started: bool = False
    is_ready: bool = False
    why_killed: str = ""
    _counts: dict[ProbeKind, ProbeCount] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_started = not self.container.get("startupProbe")
        self.is_ready = self.is_started and not self.container.get("readinessProbe")

    def ask(self) -> None:
        """Asks what is due."""
        kinds: tuple[ProbeKind, ...] = (
            ("readinessProbe", "livenessProbe") if self.is_started else ("startupProbe",)
        )
        for kind in kinds:
            probe = self.container.get(kind)
            if probe and (count := self._count(kind, probe)).is_due():
                count.count(self._answer(probe))
                self._conclude(kind, count)

    def _count(self, kind: ProbeKind, probe: Json) -> ProbeCount:
        first_s = time.monotonic() + float(probe.get("initialDelaySeconds") or 0)
        return self._counts.setdefault(kind, ProbeCount(probe, first_s))

    def _answer(self, probe: Json) -> bool:
        timeout_s = float(probe.get("timeoutSeconds") or 1)
        if "httpGet" in probe:
            return http_get(self.container, self.ip, probe["httpGet"], timeout_s)
        return execute(self.network, probe["exec"]["command"], self.values, timeout_s)

    def _conclude(self, kind: ProbeKind, count: ProbeCount) -> None:
        if kind == "startupProbe" and count.has_succeeded:
            self.is_started = True
            self.is_ready = not self.container.get("readinessProbe")
        elif kind == "readinessProbe" and (count.has_succeeded or count.has_failed):
            self.is_ready = count.has_succeeded
        elif kind != "readinessProbe" and count.has_failed:
            self.why_killed = f"{kind} failed {count.num_bad} times in a row"
