"""The proxies that `benchmarks.proxy` compares: each runs before a mock engine of its own."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import psutil

from benchmarks.stack_process import free_port

START_S = 40.0
OURS = "tandem"
OURS_IN_PAIRS = "tandem, two engines a request"
OBVIOUS = "FastAPI + httpx"
WITHOUT_TEXT = "tandem without detokenization"


@dataclass(frozen=True, slots=True)
class Candidate:
    """`command` has `{port}`, `{engine}` (its URL), `{model}`, and `{metrics_port}` where one is needed.

    `is_pair`: the engine is a completion engine, and `{prompt}` is the URL of its prompt engine.
    """

    name: str
    command: Sequence[str]
    is_pair: bool = False

    def start(self, port: int, engine_url: str, prompt_url: str, model: str) -> Sequence[str]:
        urls = {"engine": engine_url, "prompt": prompt_url}
        fields = {"port": port, **urls, "model": model, "metrics_port": free_port()}
        return [part.format(**fields) for part in self.command]


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    process: psutil.Process
    engine_url: str
    """Of the mock engine behind it."""

    def cpu_s(self) -> float:
        """Of the whole process tree."""
        return sum(map(_cpu_s, (self.process, *self.process.children(recursive=True))))

    def memory_bytes(self) -> int:
        return int(self.process.memory_info().rss)


def tandem(*flags: str, module: str = "proxy", name: str = OURS) -> Candidate:
    return _tandem(name, module, "--normal-url", "{engine}", *flags)


def tandem_pair() -> Candidate:
    urls = ("--prompt-url", "{prompt}", "--completion-url", "{engine}")
    return replace(_tandem(OURS_IN_PAIRS, "proxy", *urls), is_pair=True)


def _tandem(name: str, module: str, *flags: str) -> Candidate:
    ours = (module, "--port", "{port}", "--model", "{model}", "--log-level", "warning")
    return Candidate(name, (sys.executable, "-m", *ours, *flags))


def candidates(routers: Mapping[str, Path]) -> list[Candidate]:
    """`routers`: programs by the names of ROUTERS."""
    obvious = ("benchmarks.obvious_proxy", "--port", "{port}", "--engine-url", "{engine}")
    without_text = tandem(module="benchmarks.proxy_without_text", name=WITHOUT_TEXT)
    own = [tandem(), without_text, Candidate(OBVIOUS, (sys.executable, "-m", *obvious))]
    return own + [Candidate(name, (str(path), *ROUTERS[name])) for name, path in routers.items()]


_COMMON = (
    "--host", "127.0.0.1", "--port", "{port}", "--worker-urls", "{engine}", "--policy", "round_robin",
    "--log-level", "error", "--prometheus-port", "{metrics_port}",
)  # fmt: skip
ROUTERS: Mapping[str, Sequence[str]] = {
    "sglang-router": ("launch", *_COMMON),
    "smg": ("launch", *_COMMON),
    "vllm-router": _COMMON,
}
"""Arguments of routers from PyPI, for one engine that serves requests alone."""


@contextlib.asynccontextmanager
async def running(
    some: Sequence[Candidate], model: str, step_s: float, *, burst: int = 1
) -> AsyncIterator[dict[str, Running]]:
    """All at once, ready; every process is gone when the context is left."""
    started: list[psutil.Process] = []

    def start(command: Sequence[str]) -> psutil.Process:
        process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        started.append(process)
        return process

    def start_engine(role: str) -> str:
        port = free_port()
        engine = {"port": port, "step-s": step_s, "model": model, "burst": burst, "role": role}
        flags = [part for name, value in engine.items() for part in (f"--{name}", str(value))]
        start((sys.executable, "-m", "benchmarks.mock_engine", *flags))
        return f"http://127.0.0.1:{port}"

    try:
        proxies = {}
        for candidate in some:
            port, roles = free_port(), ("completion", "prompt") if candidate.is_pair else ("normal",)
            urls = [start_engine(role) for role in roles]
            engine_url = urls[0]
            for url in urls:
                await _until_answered(url)
            process = start(candidate.start(port, engine_url, urls[-1], model))
            proxies[candidate.name] = Running(f"http://127.0.0.1:{port}", process, engine_url)
        await asyncio.gather(*(_until_answered(proxy.url) for proxy in proxies.values()))
        await asyncio.gather(*(_until_served(proxy.url, model) for proxy in proxies.values()))
        yield proxies
    finally:
        for process in started:
            _kill_tree(process)


async def _until_answered(url: str) -> None:
    async with asyncio.timeout(START_S), httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(url + "/health")).status_code == 200:
                    return
            await asyncio.sleep(0.1)


async def _until_served(url: str, model: str) -> None:
    """Routers say that they are healthy before they know their engines."""
    body = {"model": model, "prompt": "hi", "max_tokens": 1}
    async with asyncio.timeout(START_S), httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
        while True:
            if (await client.post(url + "/v1/completions", json=body)).status_code == 200:
                return
            await asyncio.sleep(0.2)


def _cpu_s(process: psutil.Process) -> float:
    """To the nanosecond; `psutil` counts ticks of 10 ms, which is 25 small requests."""
    tasks = Path(f"/proc/{process.pid}/task")
    ran_ns = 0
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in tasks.iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                ran_ns += int((task / "schedstat").read_text().split()[0])
    return ran_ns * 1e-9


def _kill_tree(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in (*process.children(recursive=True), process):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()
