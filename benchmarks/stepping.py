"""`--overlap` against none: does it pay to do a step's bookkeeping while the model runs the next?

NORMAL engines in this process take the same loads in turns; then two whole pairs, of which one idles while
the other works. Output tokens per second from the arrival of the requests to the last token of all of them,
median of the tries; the baseline is without overlap. Run it with the machine to itself.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from statistics import median

import torch

from benchmarks.engine import Load, make_engine, run
from benchmarks.journal import Journal
from benchmarks.pair import load
from benchmarks.report import Report, argument_parser
from benchmarks.stack_process import tandem_serve
from engine.llm_engine import LLMEngine

OVERLAP = {False: "--no-overlap", True: "--overlap"}
Rate = Callable[[], float]
"""One try's output tokens per second."""


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--parts", nargs="+", default=["normal", "pair"], choices=("normal", "pair"))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--pair-streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-threads", type=int, nargs="+", default=[2, 1], help="of NORMAL engines")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--tries", type=int, default=3)
    arguments = parser.parse_args()
    report, journal = Report("stepping"), Journal()
    if "normal" in arguments.parts:
        for num_threads in arguments.num_threads:
            normal_engines(report, journal, arguments, num_threads)
    if "pair" in arguments.parts:
        pairs(report, journal, arguments)
    report.finish(arguments.json)


def normal_engines(report: Report, journal: Journal, arguments: argparse.Namespace, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    engines = {
        overlap: make_engine(
            argparse.Namespace(
                model=arguments.model, num_threads=num_threads, streams=arguments.streams, overlap=overlap
            ),
            "fp16w",
            "auto",
        )
        for overlap in OVERLAP
    }
    for engine in engines.values():
        run(engine, Load(2, 32, 4), seed=0)  # the first steps make buffers
    for num_streams in arguments.streams:
        work = Load(num_streams, arguments.prompt_tokens, arguments.output_tokens)
        rates = {overlap: partial(engine_rate, engine, work) for overlap, engine in engines.items()}
        compare(report, journal, f"NORMAL, {num_threads} threads, {num_streams} streams", rates, arguments)
    for engine in engines.values():
        engine.close()


def engine_rate(engine: LLMEngine, work: Load) -> float:
    started_s = time.perf_counter()
    run(engine, work, seed=work.num_streams)
    return work.num_streams * work.num_output_tokens / (time.perf_counter() - started_s)


def pairs(report: Report, journal: Journal, arguments: argparse.Namespace) -> None:
    num_threads = max(1, (os.cpu_count() or 2) // 2)
    flags = ("--model", arguments.model, "--num-threads", str(num_threads))
    with ExitStack() as stacks:
        urls = {
            overlap: stacks.enter_context(tandem_serve(*flags, flag)) for overlap, flag in OVERLAP.items()
        }
        for url in urls.values():
            asyncio.run(load(url, arguments.model, 1, 2, 32, 8))  # warm up
        for num_streams in arguments.pair_streams:
            rates = {
                overlap: partial(pair_rate, url, num_streams, arguments) for overlap, url in urls.items()
            }
            compare(report, journal, f"pair, {num_streams} streams", rates, arguments)


def pair_rate(url: str, num_streams: int, arguments: argparse.Namespace) -> float:
    timings = asyncio.run(
        load(
            url,
            arguments.model,
            num_streams,
            2 * num_streams,
            arguments.prompt_tokens,
            arguments.output_tokens,
        )
    )
    return timings.num_tokens / timings.elapsed_s


def compare(
    report: Report, journal: Journal, case: str, rates: Mapping[bool, Rate], arguments: argparse.Namespace
) -> None:
    found: dict[bool, list[float]] = {overlap: [] for overlap in rates}
    for number in range(arguments.tries):
        order = sorted(rates, reverse=bool(number % 2))
        for overlap in order:
            found[overlap].append(rates[overlap]())
            journal.add(case=case, overlap=overlap, tokens_per_s=round(found[overlap][-1], 2))
    baseline, overlapped = median(found[False]), median(found[True])
    report.add(case, "output tokens/s with --overlap", overlapped, "1/s", baseline)


if __name__ == "__main__":
    main()
