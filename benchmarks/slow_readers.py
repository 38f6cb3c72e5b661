"""What clients that do not read cost those that do, and the proxy's memory.

`--slow` streams are opened whose clients read nothing, with more at their beginning than sockets hold, beside
FAST that read. The rows: gaps between tokens of the fast ones alone, while the stalled ones begin, beside
them, while they are given up, and afterwards; and the proxy's memory at the end of each. All of it twice:
what the first ones held is there for the second.
"""

import argparse
import asyncio
import resource

import httpx
import uvloop

from benchmarks.proxy_candidates import OURS, Running, running, tandem
from benchmarks.proxy_load import StreamCounter, open_streams
from benchmarks.report import Report, argument_parser
from proxy.activity import quantile

FAST = 16
STEP_S = 0.25
BURST_TOKENS = 600
"""About 130 KB of events."""
WINDOW_S = 5.0
STALL_S = 30.0
"""After which a client that reads nothing is given up; longer where there are many, whose beginnings come
first."""
STALL_S_PER_READER = 0.02
NUM_ROUNDS = 2


async def main(arguments: argparse.Namespace) -> None:
    report, model = Report("slow readers", is_printed_at_once=True), arguments.model
    some = [tandem("--client-stall-timeout-s", str(stall_s_of(arguments.slow)))]
    async with running(some, model, STEP_S, burst=BURST_TOKENS) as proxies:
        proxy = proxies[OURS]
        async with open_streams(proxy.url, model, FAST) as fast:
            await asyncio.sleep(2.0)
            fast.gaps_s.clear()
            await asyncio.sleep(WINDOW_S)
            add_rows(report, "no slow readers", proxy, fast)
            for number in range(1, NUM_ROUNDS + 1):
                await add_round(report, number, proxy, fast, arguments)
            assert not fast.num_ended
    report.finish(arguments.json)


async def add_round(
    report: Report, number: int, proxy: Running, fast: StreamCounter, arguments: argparse.Namespace
) -> None:
    """So many slow readers come, stay, and are given up; nothing of the time in between is left out."""
    num_slow = arguments.slow
    slow, stall_s = f"{num_slow} slow readers, round {number}", stall_s_of(num_slow)
    async with open_streams(proxy.url, arguments.model, num_slow, reads=False):
        await until_open(proxy.url, FAST + num_slow, stall_s)
        await until_flowing(fast, stall_s)
        add_rows(report, f"{slow}: they begin", proxy, fast)
        await asyncio.sleep(WINDOW_S)
        add_rows(report, f"{slow}: they are there", proxy, fast)
        await until_open(proxy.url, FAST, 4 * stall_s)
        add_rows(report, f"{slow}: until they are given up", proxy, fast)
        await asyncio.sleep(WINDOW_S)
        add_rows(report, f"{slow}: afterwards", proxy, fast)


def stall_s_of(num_slow: int) -> float:
    return STALL_S + STALL_S_PER_READER * num_slow


async def until_flowing(fast: StreamCounter, within_s: float) -> None:
    """What the slow ones began with is passed on: the fast ones get what a second brings in a second."""
    async with asyncio.timeout(within_s):
        num_before = -FAST / STEP_S
        while fast.num_tokens - num_before < 0.9 * FAST / STEP_S or num_before < 0:
            num_before = fast.num_tokens
            await asyncio.sleep(1.0)


async def until_open(url: str, num_streams: int, within_s: float) -> None:
    """As the proxy says: clients that read nothing do not see their connection's end either."""
    open_requests = f'tandem_proxy_open_requests{{stream="true"}} {num_streams:.1f}'
    async with asyncio.timeout(within_s), httpx.AsyncClient(trust_env=False, timeout=60.0) as client:
        while True:
            if open_requests in (await client.get(url + "/metrics")).text:
                return
            await asyncio.sleep(0.5)


def add_rows(report: Report, case: str, proxy: Running, fast: StreamCounter) -> None:
    """Of all gaps since the last rows."""
    for share in (0.5, 0.99, 1.0):
        gap_s = quantile(fast.gaps_s, share)
        assert gap_s is not None
        report.add(case, f"gap between tokens of {FAST} fast readers, p{share * 100:g}", gap_s * 1e3, "ms")
    report.add(case, "proxy memory", proxy.memory_bytes() / 2**20, "MiB")
    fast.gaps_s.clear()


def _arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--slow", type=int, default=1000)
    return parser.parse_args()


if __name__ == "__main__":
    _, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_hard, _hard))
    uvloop.run(main(_arguments()))
