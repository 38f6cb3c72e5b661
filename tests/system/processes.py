"""A whole stack of real processes on loopback, as the system tests use it."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import httpx
import openai
import psutil

from launcher.child import ChildSpec
from launcher.stack import StackSettings, stack_specs
from processes.child import environment_for_child
from tests.ports import free_port, free_ports

START_TIMEOUT_S = 120.0


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Wait for something another process does; an AssertionError says what did not happen."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)


class ServiceProcess:
    """One process of the stack, its URL and its log."""

    def __init__(self, spec: ChildSpec, log_path: Path, within: Sequence[str] = ()) -> None:
        """`within`: the beginning of a command that runs the rest of it elsewhere."""
        self.spec = spec
        self._within = within
        self.url = spec.url
        self._log = log_path.open("ab")
        self.log_path = log_path
        self.process = subprocess.Popen(
            [*within, sys.executable, "-m", spec.module, *spec.arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment_for_child(),
        )

    def is_ready(self) -> bool:
        assert self.process.poll() is None, f"{self.spec.name} ended: {self.log_tail()}"
        try:
            return httpx.get(self.url + self.spec.ready_path, timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def info(self) -> dict[str, object]:
        answer: dict[str, object] = httpx.get(self.url + "/info", timeout=5.0).json()
        return answer

    def epoch(self) -> object:
        """Of the engine; None while there is none."""
        return self.info().get("epoch")

    def num_free_blocks(self) -> int:
        return int(str(self.info()["num_free_blocks"]))

    def num_usable_blocks(self) -> int:
        return int(str(self.info()["num_usable_blocks"]))

    def engine_process(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def metric(self, name: str) -> float:
        """The sum over all labels; 0 where there is none."""
        lines = httpx.get(self.url + "/metrics", timeout=5.0).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((name + " ", name + "{")))

    def log_tail(self) -> str:
        return self.log_path.read_text(errors="replace")[-3000:]

    def again(self) -> "ServiceProcess":
        """The same process started anew at its address; this one is ended at once."""
        self.process.kill()
        self.stop()
        return ServiceProcess(self.spec, self.log_path, self._within)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=20)
        finally:
            self.process.kill()
            self.process.wait()
            self._log.close()


class RunningStack:
    """Started processes by name; a context manager that leaves none behind."""

    def __init__(self, *, extra: Mapping[str, Sequence[str]] | None = None, **settings: object) -> None:
        """`extra`: further arguments of processes by role (`prompt`, `completion`, `normal`, `proxy`)."""
        self._extra = dict(extra or {})
        self._directory = tempfile.TemporaryDirectory(prefix="tandem-test-")
        arguments = {"port": free_port(), "num_threads": 1, **settings}
        self.settings = StackSettings.model_validate(arguments)
        self.services: dict[str, ServiceProcess] = {}

    def __enter__(self) -> "RunningStack":
        try:
            for spec in stack_specs(self.settings, free_ports):
                arguments = (*spec.arguments, *self._extra.get(spec.name.partition("-")[0], ()))
                self._start(replace(spec, arguments=arguments))
            for service in self.services.values():
                eventually(service.is_ready, f"{service.spec.name} is ready", START_TIMEOUT_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for service in reversed(self.services.values()):
            service.stop()
        self._directory.cleanup()

    def restart(self, name: str) -> None:
        """Start a process again at its old address; it must have ended."""
        service = self.services[name]
        service.stop()
        self._start(service.spec)

    def _start(self, spec: ChildSpec) -> None:
        path = Path(self._directory.name) / f"{spec.name}.log"
        self.services[spec.name] = ServiceProcess(spec, path)

    @property
    def prompt(self) -> ServiceProcess:
        return self.services["prompt"]

    @property
    def completion(self) -> ServiceProcess:
        return self.services["completion"]

    @property
    def url(self) -> str:
        return self.services["proxy"].url

    @contextmanager
    def client(self) -> Iterator[openai.OpenAI]:
        """An OpenAI client that reports a failure at once instead of trying again."""
        with openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=120.0) as client:
            yield client

    def free_blocks(self) -> dict[str, int]:
        return {name: self.services[name].num_free_blocks() for name in ("prompt", "completion")}

    def wait_until_nothing_is_pinned(self, timeout_s: float = 30.0) -> None:
        """Every block of both pools is free again."""

        def all_free() -> bool:
            return all(
                service.num_free_blocks() == service.num_usable_blocks()
                for service in (self.prompt, self.completion)
            )

        eventually(all_free, f"all blocks are free again, now {self.free_blocks()}", timeout_s)


def post(url: str, body: object, timeout_s: float = 60.0) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(url, content=content, headers={"content-type": "application/json"}, timeout=timeout_s)


def child_pids(pid: int) -> set[int]:
    return {child.pid for child in psutil.Process(pid).children(recursive=True)}


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
