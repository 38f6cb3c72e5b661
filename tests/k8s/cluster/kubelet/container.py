"""One container of a pod: started, probed, restarted as the pod's policy says, ended politely."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.k8s.cluster.api import Json
from tests.k8s.cluster.kubelet.node import now
from tests.k8s.cluster.kubelet.probes import ContainerHealth, execute, http_get
from tests.k8s.cluster.kubelet.surroundings import PodPlace

TICK_S = 0.1
MAX_BACKOFF_S = 10.0


@dataclass(frozen=True, slots=True)
class Start:
    """How a container is started."""

    command: list[str]
    values: Mapping[str, str]


class ContainerRunner:
    """Owns the process; `run` on a thread that lives as long as the container may be restarted."""

    def __init__(self, place: PodPlace, spec: Json, start: Start, on_change: Callable[[], None]) -> None:
        self.spec = spec
        self._place = place
        self._start = start
        self._on_change = on_change
        self._ending = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._health: ContainerHealth | None = None
        self._started_at = now()
        self.num_restarts = 0
        self.exit_code: int | None = None
        self.is_done = False
        self.was_killed = False
        """The grace was over before it left."""

    def run(self) -> None:
        while not self._ending.is_set():
            self._run_once()
            policy = self._place.pod["spec"].get("restartPolicy", "Always")
            if self._ending.is_set() or policy == "Never" or (policy == "OnFailure" and self.exit_code == 0):
                break
            self.num_restarts += 1
            self._ending.wait(min(MAX_BACKOFF_S, 0.5 * 2.0**self.num_restarts))
        self.is_done = True
        self._on_change()

    def _run_once(self) -> None:
        log_path = self._place.folder / f"{self.spec['name']}.log"
        with log_path.open("ab") as log:
            self._process = process = subprocess.Popen(
                self._start.command,
                env=dict(self._start.values),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started_at, self.exit_code = now(), None
        place = self._place
        self._health = health = ContainerHealth(self.spec, place.ip, place.network, self._start.values)
        self._on_change()
        while process.poll() is None:
            before = (health.is_started, health.is_ready)
            if not self._ending.is_set() or health.is_started:
                health.ask()
            if before != (health.is_started, health.is_ready):
                self._on_change()
            if health.why_killed and not self._ending.is_set():
                print(f"{place.name}/{self.spec['name']}: {health.why_killed}", flush=True)
                self._terminate(process, 30.0)
            time.sleep(TICK_S)
        self.exit_code = process.returncode
        _signal_group(process, signal.SIGKILL)  # nothing of a container survives it
        self._health = None
        self._on_change()

    def end(self, grace_s: float) -> None:
        """preStop, SIGTERM, and SIGKILL once the grace is over; returns when the process has ended."""
        self._ending.set()
        if self._process is not None and self._process.poll() is None:
            self._terminate(self._process, grace_s)

    def kill(self) -> None:
        self._ending.set()
        if self._process is not None:
            _signal_group(self._process, signal.SIGKILL)

    def _terminate(self, process: "subprocess.Popen[bytes]", grace_s: float) -> None:
        deadline_s = time.monotonic() + grace_s
        self._pre_stop(grace_s)
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(max(2.0, deadline_s - time.monotonic()) if grace_s else 0.0)
        except subprocess.TimeoutExpired:
            self.was_killed = True
            print(f"{self._place.name}/{self.spec['name']}: killed after {grace_s:g} s", flush=True)
            _signal_group(process, signal.SIGKILL)
            process.wait()

    def _pre_stop(self, grace_s: float) -> None:
        hook = (self.spec.get("lifecycle") or {}).get("preStop") or {}
        if "exec" in hook:
            execute(self._place.network, hook["exec"]["command"], self._start.values, max(0.1, grace_s))
        elif "httpGet" in hook:
            http_get(self.spec, self._place.ip, hook["httpGet"], max(0.1, grace_s))

    @property
    def is_ready(self) -> bool:
        return self._health is not None and self._health.is_ready

    def status(self) -> Json:
        """A `containerStatus`."""
        if self._health is not None:
            state: Json = {"running": {"startedAt": self._started_at}}
        elif self.exit_code is not None and (self.is_done or self._ending.is_set()):
            state = {
                "terminated": {"exitCode": self.exit_code, "startedAt": self._started_at, "finishedAt": now()}
            }
        else:
            reason = "CrashLoopBackOff" if self.num_restarts or self.exit_code else "ContainerCreating"
            state = {"waiting": {"reason": reason}}
        return {
            "name": self.spec["name"],
            "image": self.spec["image"],
            "imageID": "process",
            "ready": self.is_ready,
            "started": self._health is not None and self._health.is_started,
            "restartCount": self.num_restarts,
            "state": state,
        }


def _signal_group(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
