"""The prefix cache: what a look-up costs, what traces find in it, what a repeated prompt gains.

1. Keys of 1,024 tokens in blocks of 16: match and insert in thread-CPU time, the tokens as they are in a
   sequence, so making the key counts. SGLang's figures: 47 and 197 us (Python core), 16 and 59 us (Rust).
2. Share of the blocks of the Mooncake traces that is found, by cache size; the baseline is an infinite cache.
3. What each waiting policy costs a step (`benchmarks.waiting`).
4. Time to first token of a prompt of 1,500 random tokens, asked for the first time and again, through one
   NORMAL engine and through a pair. The baseline of the second is the first.
"""

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import httpx
import numpy as np

from benchmarks import waiting
from benchmarks.pair import Timings, one_request
from benchmarks.report import Report, argument_parser
from benchmarks.stack_process import tandem_serve
from benchmarks.traces import BLOCK_TOKENS, hit_ratio, read_trace
from shared_scheduler import BlockManager, PrefixCache
from shared_scheduler.radix_tree import key_of
from shared_scheduler.rows import Int32Array

KEY_TOKENS = 1024
KEY_BLOCK_SIZE = 16
NUM_KEYS = 2000
PUBLISHED_US = {"match": 47.0, "insert": 197.0}
"""SGLang's Python core; on another machine."""
CACHE_TOKENS = (1_000_000, 3_000_000, 10_000_000, 50_000_000)
TRACES = {"conversation": "mooncake_conversation_blocks", "synthetic": "mooncake_synthetic_blocks"}


@dataclass(frozen=True, slots=True)
class TreeTimes:
    """Microseconds of each call."""

    insert: list[float]
    match: list[float]
    match_half: list[float]
    """Keys that part from a known one in the middle."""


def time_tree(num_keys: int = NUM_KEYS) -> TreeTimes:
    num_blocks = KEY_TOKENS // KEY_BLOCK_SIZE
    pool = BlockManager(num_keys * num_blocks + 1)
    cache = PrefixCache(pool, KEY_BLOCK_SIZE)
    tokens = np.random.default_rng(0).integers(0, 50_000, (num_keys, KEY_TOKENS), np.int32)

    def key(row: Int32Array) -> bytes:
        return key_of(row, num_blocks, KEY_BLOCK_SIZE)

    def inserts() -> Iterator[Callable[[], object]]:
        for row in tokens:
            table = pool.allocate(num_blocks)
            yield lambda row=row, table=table: cache.insert(key(row), "", table, may_swap=False)  # type: ignore[misc]
            pool.free(table)

    inserted = _timed(inserts())
    matched = _timed((lambda row=row: cache.match(key(row), "")) for row in tokens)  # type: ignore[misc]
    tokens[:, KEY_TOKENS // 2 :] += 1
    half = _timed((lambda row=row: cache.match(key(row), "")) for row in tokens)  # type: ignore[misc]
    return TreeTimes(inserted, matched, half)


def _timed(calls: Iterator[Callable[[], object]]) -> list[float]:
    times = []
    for call in calls:
        start = time.thread_time_ns()
        call()
        times.append((time.thread_time_ns() - start) / 1e3)
    return times


def add_tree(report: Report) -> None:
    times = time_tree()
    case = f"{KEY_TOKENS:,}-token keys, blocks of {KEY_BLOCK_SIZE}"
    report.add(case, "match, median", median(times.match), "us", PUBLISHED_US["match"])
    report.add(case, "match of one half, median", median(times.match_half), "us", PUBLISHED_US["match"])
    report.add(case, "insert, median", median(times.insert), "us", PUBLISHED_US["insert"])


def add_traces(report: Report) -> None:
    for name, file in TRACES.items():
        trace = read_trace(file)
        infinite = hit_ratio(trace, sum(ids.size for ids in trace))
        for num_tokens in CACHE_TOKENS:
            found = hit_ratio(trace, num_tokens // BLOCK_TOKENS)
            report.add(f"{name}, {num_tokens // 1_000_000} M tokens", "blocks found", found, "", infinite)


async def first_and_repeated(
    url: str, model: str, num_tokens: int, num_prompts: int
) -> tuple[Timings, Timings]:
    """Ask every prompt twice in a row, one request at a time."""
    chance = random.Random(1)
    cold, warm = Timings(), Timings()
    async with httpx.AsyncClient(timeout=300.0) as client:
        for number in range(num_prompts + 1):
            prompt = [chance.randrange(100, 40_000) for _ in range(num_tokens)]
            body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True}
            for timings in (cold, warm) if number else (Timings(), Timings()):  # the first one warms up
                await one_request(client, url + "/v1/completions", body, timings)
    return cold, warm


async def add_repeated(report: Report, model: str, num_tokens: int, num_prompts: int) -> None:
    num_cores = os.cpu_count() or 2
    for engine, threads in {"normal": num_cores, "pair": max(1, num_cores // 2)}.items():
        with tandem_serve("--model", model, "--engine", engine, "--num-threads", str(threads)) as url:
            cold, warm = await first_and_repeated(url, model, num_tokens, num_prompts)
        case = f"{engine}, prompt of {num_tokens:,} tokens"
        first_s = median(cold.first_token_s)
        report.add(case, "TTFT, first time, median", first_s, "s")
        report.add(case, "TTFT, repeated, median", median(warm.first_token_s), "s", first_s)


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--no-engine", action="store_true", help="leave out what needs a model")
    arguments = parser.parse_args()
    report = Report("prefix")
    add_tree(report)
    add_traces(report)
    waiting.add_rows(report, num_steps=100)
    if not arguments.no_engine:
        asyncio.run(add_repeated(report, arguments.model, arguments.prompt_tokens, arguments.prompts))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
