"""The pair against one NORMAL engine on the same cores: time to first token and inter-token latency.

Closed loop: each stream sends its next request when the last one is complete. Prompts are random token
ids, so no prefix is shared. Each configuration has the machine to itself, one after the other.
"""

import asyncio
import json
import os
import random
import time
from dataclasses import dataclass, field
from statistics import median, quantiles

import httpx

from benchmarks.report import Report, argument_parser
from benchmarks.stack_process import tandem_serve

STREAMS = (1, 4, 16)
NUM_REQUESTS = {1: 6, 4: 12, 16: 32}
"""Requests in total, by number of streams."""


@dataclass(slots=True)
class Timings:
    """Seconds, over all requests of one load."""

    first_token_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    elapsed_s: float = 0.0


async def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    arguments = parser.parse_args()
    num_cores = os.cpu_count() or 2
    engines = {
        "normal": ("--engine", "normal", "--num-threads", str(num_cores)),
        "pair": ("--engine", "pair", "--num-threads", str(max(1, num_cores // 2))),
    }
    timings: dict[tuple[str, int], Timings] = {}
    for engine, flags in engines.items():
        with tandem_serve("--model", arguments.model, *flags) as url:
            await load(url, arguments.model, 1, 2, arguments.prompt_tokens, 8)  # warm up
            for num_streams in STREAMS:
                timings[engine, num_streams] = await load(
                    url,
                    arguments.model,
                    num_streams,
                    NUM_REQUESTS[num_streams],
                    arguments.prompt_tokens,
                    arguments.output_tokens,
                )
    report = Report("pair")
    for num_streams in STREAMS:
        add_rows(report, num_streams, timings["pair", num_streams], timings["normal", num_streams])
    report.finish(arguments.json)


def add_rows(report: Report, num_streams: int, pair: Timings, normal: Timings) -> None:
    """The pair's figures, with the NORMAL engine's as their baseline."""
    case = f"{num_streams} streams"
    report.add(case, "TTFT median", median(pair.first_token_s), "s", median(normal.first_token_s))
    report.add(case, "TTFT p90", _p90(pair.first_token_s), "s", _p90(normal.first_token_s))
    report.add(case, "ITL median", median(pair.gap_s) * 1000, "ms", median(normal.gap_s) * 1000)
    report.add(case, "ITL p99", _p99(pair.gap_s) * 1000, "ms", _p99(normal.gap_s) * 1000)
    report.add(case, "ITL max", max(pair.gap_s) * 1000, "ms", max(normal.gap_s) * 1000)
    report.add(
        case,
        "output tokens/s",
        pair.num_tokens / pair.elapsed_s,
        "1/s",
        normal.num_tokens / normal.elapsed_s,
    )


async def load(
    url: str, model: str, num_streams: int, num_requests: int, num_prompt_tokens: int, num_output_tokens: int
) -> Timings:
    """Send `num_requests` over `num_streams` streams at a time."""
    chance = random.Random(num_streams)
    prompts = [[chance.randrange(100, 40_000) for _ in range(num_prompt_tokens)] for _ in range(num_requests)]
    timings = Timings()
    started_s = time.perf_counter()
    async with httpx.AsyncClient(timeout=300.0) as client:

        async def stream() -> None:
            while prompts:
                body = {
                    "model": model,
                    "prompt": prompts.pop(),
                    "max_tokens": num_output_tokens,
                    "temperature": 0,
                    "stream": True,
                    "ignore_eos": True,
                }
                await one_request(client, url + "/v1/completions", body, timings)

        await asyncio.gather(*(stream() for _ in range(num_streams)))
    timings.elapsed_s = time.perf_counter() - started_s
    return timings


async def one_request(client: httpx.AsyncClient, url: str, body: dict[str, object], timings: Timings) -> None:
    """Stream one completion and note when each of its chunks with text came."""
    last_s = started_s = time.perf_counter()
    is_first = True
    async with client.stream("POST", url, json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"the stream failed: {event['error']}")
            now_s = time.perf_counter()
            timings.num_tokens += 1
            if is_first:
                timings.first_token_s.append(now_s - started_s)
                is_first = False
            else:
                timings.gap_s.append(now_s - last_s)
            last_s = now_s


def _p90(values: list[float]) -> float:
    return quantiles(values, n=10)[-1]


def _p99(values: list[float]) -> float:
    return quantiles(values, n=100)[-1]


if __name__ == "__main__":
    asyncio.run(main())
