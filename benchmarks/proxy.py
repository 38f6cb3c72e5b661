"""What the proxy costs: CPU per token and per small request, with token links and with a stream per request.

Both ways run in one go, before the same kind of engine: the real completion service with an engine that only
counts (`benchmarks.paced_engine`). CPU time is that of the proxy's process, and of the service's;
detokenization and JSON are part of the proxy's.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from statistics import median
from urllib.parse import urlsplit

import httpx
import psutil

from benchmarks.report import Report, argument_parser
from benchmarks.stack_process import free_port

WAYS = {"a request each": "--no-token-link", "token link": "--token-link"}
STREAMS = (16, 64)
STEP_S = 0.05
WINDOW_S = 3.0
NUM_WINDOWS = 3
NUM_CLIENTS = 16
NUM_SMALL_REQUESTS = 400
SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Processes:
    """One proxy and the service behind it."""

    url: str
    proxy: psutil.Process
    service: psutil.Process

    def cpu_s(self) -> tuple[float, float]:
        return _cpu_s(self.proxy), _cpu_s(self.service)


@dataclass(slots=True)
class Counter:
    num_tokens: int = 0


async def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    arguments = parser.parse_args()
    report = Report("proxy")
    paced = {num_streams: await measure_streams(arguments.model, num_streams) for num_streams in STREAMS}
    for num_streams, costs in paced.items():
        add_rows(report, f"{num_streams} paced streams", "CPU per token", costs)
    add_rows(
        report, f"{NUM_CLIENTS} clients", "CPU per small request", await measure_requests(arguments.model)
    )
    report.finish(arguments.json)


def add_rows(report: Report, case: str, metric: str, costs: dict[str, tuple[float, float]]) -> None:
    """`costs`: by way, seconds of the proxy's and of the service's CPU."""
    baselines = costs["a request each"]
    for way, values in costs.items():
        for place, process in enumerate(("proxy", "service")):
            report.add(
                f"{case}, {way}", f"{process} {metric}", values[place] * 1e6, "us", baselines[place] * 1e6
            )


async def measure_streams(model: str, num_streams: int) -> dict[str, tuple[float, float]]:
    with running_ways(model, STEP_S) as ways:
        await asyncio.gather(*(until_ready(processes.url) for processes in ways.values()))
        async with contextlib.AsyncExitStack() as streams:
            counters = {
                way: await streams.enter_async_context(open_streams(processes.url, model, num_streams))
                for way, processes in ways.items()
            }
            await asyncio.sleep(SETTLE_S)
            windows: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
            for _ in range(NUM_WINDOWS):
                # All ways run at the same time, so that the machine is the same for both.
                before = {way: (ways[way].cpu_s(), counters[way].num_tokens) for way in ways}
                await asyncio.sleep(WINDOW_S)
                for way in ways:
                    (proxy_s, service_s), num_tokens = before[way]
                    num_new = counters[way].num_tokens - num_tokens
                    now = ways[way].cpu_s()
                    windows[way].append(((now[0] - proxy_s) / num_new, (now[1] - service_s) / num_new))
    return {way: _median(costs) for way, costs in windows.items()}


async def measure_requests(model: str) -> dict[str, tuple[float, float]]:
    with running_ways(model, 0.001) as ways:
        await asyncio.gather(*(until_ready(processes.url) for processes in ways.values()))
        costs: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(NUM_WINDOWS):
            for way, processes in ways.items():
                before = processes.cpu_s()
                await small_requests(processes.url, model)
                now = processes.cpu_s()
                costs[way].append(
                    ((now[0] - before[0]) / NUM_SMALL_REQUESTS, (now[1] - before[1]) / NUM_SMALL_REQUESTS)
                )
    return {way: _median(values) for way, values in costs.items()}


@contextlib.contextmanager
def running_ways(model: str, step_s: float) -> Iterator[dict[str, Processes]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> psutil.Process:
        process = subprocess.Popen([sys.executable, "-m", *arguments])
        started.append(process)
        return psutil.Process(process.pid)

    try:
        ways = {}
        for way, flag in WAYS.items():
            engine_port, port = free_port(), free_port()
            engine = start(
                "benchmarks.paced_engine",
                "--port",
                str(engine_port),
                "--step-s",
                str(step_s),
                "--model",
                model,
            )
            engine_url = f"http://127.0.0.1:{engine_port}"
            proxy = start(
                "proxy", "--port", str(port), "--model", model, "--normal-url", engine_url, flag,
                "--log-level", "warning",
            )  # fmt: skip
            ways[way] = Processes(f"http://127.0.0.1:{port}", proxy, engine)
        yield ways
    finally:
        for process in started:
            process.kill()
            process.wait()


async def until_ready(url: str) -> None:
    async with httpx.AsyncClient(timeout=5.0) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(url + "/health")).status_code == 200:
                    return
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def open_streams(url: str, model: str, num_streams: int) -> AsyncIterator[Counter]:
    counter = Counter()
    reading = [asyncio.create_task(_read_stream(url, model, counter)) for _ in range(num_streams)]
    try:
        yield counter
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def _read_stream(url: str, model: str, counter: Counter) -> None:
    reader, writer = await _post(url, {"model": model, "prompt": "hi", "max_tokens": 100_000, "stream": True})
    try:
        while data := await reader.read(1 << 16):
            counter.num_tokens += data.count(b"data: ")
    finally:
        writer.close()


async def small_requests(url: str, model: str) -> None:
    async def client() -> None:
        for _ in range(NUM_SMALL_REQUESTS // NUM_CLIENTS):
            reader, writer = await _post(
                url, {"model": model, "prompt": "hi", "max_tokens": 4, "stream": True}
            )
            await reader.readuntil(b"[DONE]")
            writer.close()

    await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))


async def _post(url: str, body: dict[str, object]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    return reader, writer


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _median(costs: list[tuple[float, float]]) -> tuple[float, float]:
    return median(cost[0] for cost in costs), median(cost[1] for cost in costs)


if __name__ == "__main__":
    asyncio.run(main())
