"""Prompt service, completion service and proxy on hosts of their own, over a link that can be slow, and cut.

    prompt 10.77.0.1 ──── data, slow ──── 10.77.0.2 completion
           10.77.1.2 ──── proxy 10.77.1.1, 10.77.2.1 ──── 10.77.2.2

While the stack runs, the thread that started it lives on the proxy's host, and so do threads it starts.
"""

import ctypes
import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from launcher.child import ChildSpec
from tests.kv_transfer.namespaces import run
from tests.system.processes import START_TIMEOUT_S, ServiceProcess, eventually

CLONE_NEWNET = 0x40000000
_numbers = itertools.count()
PROMPT_DATA, COMPLETION_DATA = "10.77.0.1", "10.77.0.2"
PROMPT_URL, COMPLETION_URL = "http://10.77.1.2:7001", "http://10.77.2.2:7002"
PROXY_URL = "http://10.77.1.1:8000"
ANOTHER_PORT = 7003
ANOTHER_URL = f"http://10.77.2.2:{ANOTHER_PORT}"


class ThreeHosts:
    """A context manager that leaves nothing behind."""

    def __init__(self, rate: str) -> None:
        self._rate = rate
        self._name = f"tandem-{os.getpid()}-{next(_numbers)}-"  # several stacks may stand at once

    def __enter__(self) -> "ThreeHosts":
        for host in ("prompt", "completion", "proxy"):
            run("ip", "netns", "add", self._name + host)
            run("ip", "-n", self._name + host, "link", "set", "lo", "up")
        self._join(("prompt", "data", PROMPT_DATA), ("completion", "data", COMPLETION_DATA))
        self._join(("prompt", "web", "10.77.1.2"), ("proxy", "web1", "10.77.1.1"))
        self._join(("completion", "web", "10.77.2.2"), ("proxy", "web2", "10.77.2.1"))
        bucket = ("rate", self._rate, "burst", "64kb", "latency", "100ms")
        for host in ("prompt", "completion"):
            run("tc", "-n", self._name + host, "qdisc", "add", "dev", "data", "root", "tbf", *bucket)
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for host in ("prompt", "completion", "proxy"):
            run("ip", "netns", "del", self._name + host)

    def _join(self, *ends: tuple[str, str, str]) -> None:
        """Host, link and address of either end."""
        (one, left, _), (other, right, _) = ends
        run(
            "ip", "link", "add", left, "netns", self._name + one,
            "type", "veth", "peer", "name", right, "netns", self._name + other,
        )  # fmt: skip
        for host, link, address in ends:
            run("ip", "-n", self._name + host, "address", "add", f"{address}/24", "dev", link)
            run("ip", "-n", self._name + host, "link", "set", link, "up")

    def cut(self) -> None:
        run("ip", "-n", self._name + "prompt", "link", "set", "data", "down")

    def join(self) -> None:
        run("ip", "-n", self._name + "prompt", "link", "set", "data", "up")

    def on(self, host: str) -> tuple[str, ...]:
        """The beginning of a command that runs there."""
        return ("ip", "netns", "exec", self._name + host)

    @contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """This thread, and those it starts meanwhile, open their connections there."""
        with open("/proc/thread-self/ns/net") as home, open(f"/var/run/netns/{self._name}{host}") as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())


def _enter(namespace_fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace_fd, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


class StackOnHosts:
    """The three services as processes; a context manager that leaves none behind."""

    def __init__(
        self,
        model: Path,
        shared: Sequence[str],
        *,
        rate: str,
        prompt: Sequence[str] = (),
        completion: Sequence[str] = (),
        another: Sequence[str] | None = None,
        transport: str = "zmq",
    ) -> None:
        """`another`: arguments of a second completion engine beside the first, if there is to be one."""
        model_id = ("--model", str(model))
        engine = (*model_id, "--transport", transport, *shared)
        there = ("--host", "10.77.2.2", "--control-host", COMPLETION_DATA)
        self.hosts = ThreeHosts(rate)
        self._specs = {
            "prompt": self._engine(
                "prompt", PROMPT_URL, "--host", "10.77.1.2", "--control-host", PROMPT_DATA, *engine, *prompt
            ),
            "completion": self._engine("completion", COMPLETION_URL, *there, *engine, *completion),
        }
        proxy = ["--host", "0.0.0.0", "--port", "8000", "--prompt-url", PROMPT_URL]
        proxy += ["--completion-url", COMPLETION_URL, *model_id, "--refresh-s", "0.2"]
        if another is not None:
            self._specs["another"] = self._engine("completion", ANOTHER_URL, *there, *engine, *another)
            proxy += ["--completion-url", ANOTHER_URL]
        self._specs["proxy"] = ChildSpec("proxy", "proxy", tuple(proxy), PROXY_URL, "/health")
        self._stack = ExitStack()
        self.services: dict[str, ServiceProcess] = {}

    def _engine(self, role: str, url: str, *arguments: str) -> ChildSpec:
        port = url.rpartition(":")[2]
        return ChildSpec(role, f"{role}_service", ("--port", port, *arguments), url, "/health/ready")

    def __enter__(self) -> "StackOnHosts":
        with ExitStack() as stack:
            stack.enter_context(self.hosts)
            stack.enter_context(self.hosts.inside("proxy"))
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-hosts-")))
            stack.callback(self._end)
            for name, spec in self._specs.items():
                host = "completion" if name == "another" else name
                self.services[name] = ServiceProcess(spec, logs / name, self.hosts.on(host))
            for service in self.services.values():
                eventually(service.is_ready, f"{service.spec.name} is ready", START_TIMEOUT_S)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _end(self) -> None:
        for service in reversed(self.services.values()):
            service.process.kill()
            service.stop()

    @property
    def engines(self) -> list[ServiceProcess]:
        return [service for name, service in self.services.items() if name != "proxy"]

    def restart(self, name: str) -> None:
        self.services[name] = self.services[name].again()

    def nothing_is_held(self) -> bool:
        return all(
            engine.num_free_blocks() == engine.num_usable_blocks()
            and engine.metric("tandem_engine_handovers") == 0
            for engine in self.engines
        )
