"""What a proxy costs: CPU per token and per small request, beside the obvious design and other routers.

All proxies run in one go, each before a mock engine of its own, and are measured in turns or at the same
time, by the CPU time of their process trees. Tandem's proxy makes text of token ids, which no other here
does: it runs a second time without, and what text costs is a row of its own. Routers from PyPI take part
where their programs are named, such as `--router smg=/opt/smg/bin/smg`.
"""

import argparse
import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

import uvloop

from benchmarks.proxy_candidates import (
    OBVIOUS,
    OURS,
    OURS_IN_PAIRS,
    ROUTERS,
    WITHOUT_TEXT,
    Candidate,
    Running,
    candidates,
    running,
    tandem_pair,
)
from benchmarks.proxy_load import open_streams, small_requests
from benchmarks.report import Report, argument_parser
from proxy.text_model import TextModel
from proxy.text_stream import TextStream
from wire.services import OutputToken

PACED_STREAMS = (16, 64)
STEP_S = 0.05
UNPACED_STREAMS = 64
WINDOW_S = 2.0
NUM_WINDOWS = 3
SETTLE_S = 1.0
MANY_CLIENTS = 256
CLIENTS = (1, 16, MANY_CLIENTS)
NUM_SMALL_REQUESTS = 256
NUM_ALONE = 48
"""Of one client, one after the other: a router without TCP_NODELAY takes 44 ms for each."""
NUM_TEXT_TOKENS = 100_000

Costs = dict[str, list[float]]


async def main(arguments: argparse.Namespace) -> None:
    some = [one for one in candidates(dict(arguments.router)) if arguments.only in ("", one.name)]
    model, report = arguments.model, Report("proxy", is_printed_at_once=True)
    if "paced" in arguments.rows:
        for num_streams in PACED_STREAMS:
            costs = await measure_paced(some, model, num_streams)
            add_rows(report, f"{num_streams} paced streams", "CPU per token", "us", costs, 1e6)
    if "unpaced" in arguments.rows:
        rates = await measure_unpaced(some, model)
        add_rows(report, f"{UNPACED_STREAMS} streams, unpaced", "tokens per second", "1/s", rates)
    if "requests" in arguments.rows:
        pairs = [tandem_pair()] if arguments.only in ("", OURS, OURS_IN_PAIRS) else []
        await add_request_rows(report, some + pairs, model)
    if "text" in arguments.rows:
        report.add(f"{OURS}: text of a token alone", "CPU per token", text_cost_s(model) * 1e6, "us")
    report.finish(arguments.json)


def add_rows(report: Report, case: str, metric: str, unit: str, values: Costs, factor: float = 1.0) -> None:
    """The baseline is the best of the others."""
    medians = {name: median(some) * factor for name, some in values.items()}
    ours = (OURS, OURS_IN_PAIRS, WITHOUT_TEXT)
    others = [value for name, value in medians.items() if name not in ours]
    best = max if unit == "1/s" else min
    for name, value in medians.items():
        report.add(f"{case}: {name}", metric, value, unit, best(others) if others and name in ours else None)


async def measure_paced(some: list[Candidate], model: str, num_streams: int) -> Costs:
    """All at the same time, so that the machine is the same for all."""
    costs: Costs = {one.name: [] for one in some}
    async with running(some, model, STEP_S) as proxies, AsyncExitStack() as streams:
        counters = {
            name: await streams.enter_async_context(open_streams(proxy.url, model, num_streams))
            for name, proxy in proxies.items()
        }
        await asyncio.sleep(SETTLE_S)
        for _ in range(NUM_WINDOWS):
            before = {name: (proxies[name].cpu_s(), counters[name].num_tokens) for name in proxies}
            await asyncio.sleep(WINDOW_S)
            for name, (cpu_s, num_tokens) in before.items():
                num_new = counters[name].num_tokens - num_tokens
                costs[name].append((proxies[name].cpu_s() - cpu_s) / num_new)
    return costs


async def measure_unpaced(some: list[Candidate], model: str) -> Costs:
    """One after the other: they would take the processors from each other."""
    rates: Costs = {one.name: [] for one in some}
    async with running(some, model, 0.0) as proxies:
        for _ in range(NUM_WINDOWS):
            for name, proxy in proxies.items():
                async with open_streams(proxy.url, model, UNPACED_STREAMS) as counter:
                    await asyncio.sleep(SETTLE_S)
                    before, since_s = counter.num_tokens, time.perf_counter()
                    await asyncio.sleep(WINDOW_S)
                    rates[name].append((counter.num_tokens - before) / (time.perf_counter() - since_s))
                    if counter.num_ended:
                        raise RuntimeError(f"{name} ended {counter.num_ended} streams")
    return rates


async def add_request_rows(report: Report, some: list[Candidate], model: str) -> None:
    async with running(some, model, 0.0) as proxies:
        for num_clients in CLIENTS:
            # httpx's pool takes 40 ms for each of them: minutes in all.
            measured = {n: p for n, p in proxies.items() if num_clients < MANY_CLIENTS or n != OBVIOUS}
            costs = await measure_requests(measured, model, num_clients)
            add_rows(report, f"{num_clients} clients", "CPU per small request", "us", costs, 1e6)
        costs = await measure_requests(proxies, model, 16, stream=True)
        add_rows(report, "16 clients, streamed", "CPU per small request", "us", costs, 1e6)
        add_rows(
            report, "1 client", "added time to first token", "ms", await measure_added(proxies, model), 1e3
        )


async def measure_added(proxies: Mapping[str, Running], model: str) -> Costs:
    """What a proxy adds to its engine's own time to the first token, while nothing else happens."""
    added: Costs = {name: [] for name in proxies}
    for _ in range(NUM_WINDOWS):
        for name, proxy in proxies.items():
            took_s = {}
            for url in (proxy.engine_url, proxy.url):
                waited = await small_requests(
                    url, model, num_clients=1, num_requests=NUM_ALONE, stream=True, max_tokens=1
                )
                took_s[url] = median(waited.first_byte_s)
            added[name].append(took_s[proxy.url] - took_s[proxy.engine_url])
    return added


async def measure_requests(
    proxies: Mapping[str, Running], model: str, num_clients: int, *, stream: bool = False
) -> Costs:
    """CPU seconds of a request."""
    costs: Costs = {name: [] for name in proxies}
    num_requests = max(NUM_SMALL_REQUESTS, 4 * num_clients) if num_clients > 1 else NUM_ALONE
    for _ in range(NUM_WINDOWS):
        for name, proxy in proxies.items():
            before = proxy.cpu_s()
            await small_requests(
                proxy.url, model, num_clients=num_clients, num_requests=num_requests, stream=stream
            )
            costs[name].append((proxy.cpu_s() - before) / num_requests)
    return costs


def text_cost_s(model: str) -> float:
    """Of one token: ids to text, as every stream does it."""
    from model_files import resolve_model

    text = TextModel.from_files(resolve_model(model))
    stream = TextStream(text.vocabulary)
    tokens = [(OutputToken(index=index, token_id=1000 + index % 500),) for index in range(NUM_TEXT_TOKENS)]
    since_s = time.process_time()
    for token in tokens:
        stream.push_text(token)
    return (time.process_time() - since_s) / NUM_TEXT_TOKENS


def _router(value: str) -> tuple[str, Path]:
    name, _, path = value.partition("=")
    if name not in ROUTERS or not path:
        raise argparse.ArgumentTypeError(f"{value!r} is not NAME=PROGRAM with a NAME of {', '.join(ROUTERS)}")
    return name, Path(path)


def _arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--router", type=_router, action="append", default=[], metavar="NAME=PROGRAM")
    parser.add_argument("--only", default="", help="measure the proxy of this name alone")
    parser.add_argument("--rows", nargs="*", default=["paced", "unpaced", "requests", "text"])
    return parser.parse_args()


if __name__ == "__main__":
    uvloop.run(main(_arguments()))
