"""Steps of our engine beside llama.cpp's, in one process, on the same GGUF file and the same threads.

`python -m benchmarks.llama_cpp MODEL.gguf [--json FILE]` needs the package llama-cpp-py-sync, which brings a
build of llama.cpp; it is no dependency of ours. Engines take turns step by step. `--cpu-time` counts what the
one thread has worked instead of what has passed: a busy machine falsifies that less. Every sequence has 256
tokens behind it when it decodes; the baseline is llama.cpp.
"""

import argparse
import random
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.report import Report, argument_parser
from engine.config import KernelChoice
from engine.model_runner import load_model_runner
from model_files import resolve_model
from processes.heap import keep_freed_memory

CONTEXT, PROMPT, BLOCK = 256, 512, 32
REPEATS = {1: 16, 4: 8, 16: 5, 32: 4, 64: 4}
Work = Callable[[], object]


class Engine(Protocol):
    def prefill(self, token_ids: list[int]) -> Work:
        """Computing this prompt, alone and from its beginning."""

    def start(self, num_streams: int) -> None:
        """So many sequences that have CONTEXT - 1 tokens."""

    def decode(self, token_id: int, step: int) -> Work:
        """One step in which each of them takes this token; `step` counts from 0."""


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

    def prefill(self, token_ids: list[int]) -> Work:
        num_blocks = -(-len(token_ids) // BLOCK)
        batch = StepArrays(token_ids, [0], [len(token_ids)], [list(range(1, 1 + num_blocks))])
        return lambda: self._runner.forward(batch)  # type: ignore[arg-type]

    def start(self, num_streams: int) -> None:
        """What lies in the pool does not matter to the time."""
        width = CONTEXT // BLOCK + 1
        self._tables = [list(range(1 + width * i, 1 + width * (i + 1))) for i in range(num_streams)]

    def decode(self, token_id: int, step: int) -> Work:
        n, before = len(self._tables), CONTEXT - 1 + step
        batch = StepArrays([token_id] * n, [before] * n, [1] * n, self._tables)
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
    def __init__(self, path: Path, num_threads: int) -> None:
        self._lib: Any = import_module("llama_cpp_py_sync._cffi_bindings").get_lib()
        self._num_threads = num_threads
        self._lib.llama_backend_init()
        parameters = self._lib.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), parameters)
        self._context: Any = None
        self._num_streams = 0

    def prefill(self, token_ids: list[int]) -> Work:
        self._open(1, 2 * PROMPT)
        last = len(token_ids) - 1
        return self._work([(token_id, i, 0, i == last) for i, token_id in enumerate(token_ids)])

    def start(self, num_streams: int) -> None:
        self._open(num_streams, 2 * CONTEXT)
        self._work([(100 + i, i, 0, False) for i in range(CONTEXT - 1)])()
        for sequence in range(1, num_streams):
            self._lib.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)
        self._num_streams = num_streams

    def decode(self, token_id: int, step: int) -> Work:
        return self._work([(token_id, CONTEXT - 1 + step, i, True) for i in range(self._num_streams)])

    def _open(self, num_streams: int, num_tokens: int) -> None:
        if self._context is not None:
            self._lib.llama_free(self._context)
        parameters = self._lib.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = num_streams * num_tokens, num_streams
        parameters.n_batch = parameters.n_ubatch = PROMPT
        parameters.n_threads = parameters.n_threads_batch = self._num_threads
        self._context = self._lib.llama_init_from_model(self._model, parameters)
        self._memory = self._lib.llama_get_memory(self._context)

    def _work(self, rows: list[tuple[int, int, int, bool]]) -> Work:
        """rows: token, position, sequence, are its logits wanted?"""
        batch = self._lib.llama_batch_init(len(rows), 0, 1)
        for i, (token_id, position, sequence, has_logits) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token_id, position, has_logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        batch.n_tokens = len(rows)

        def run() -> None:
            code = self._lib.llama_decode(self._context, batch)
            if code:
                raise RuntimeError(f"llama_decode answered {code}")
            self._lib.llama_synchronize(self._context)

        return run


def main() -> None:
    parser = argument_parser("Steps of the engine beside llama.cpp's")
    parser.add_argument("gguf", type=Path, help="the model, for both")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="with one thread: time that it worked")
    parser.add_argument("--streams", type=int, nargs="+", default=list(REPEATS))
    parser.add_argument("--ours", nargs="+", default=["native fp16w", "native q4"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    keep_freed_memory()
    engines: dict[str, Engine] = {"llama.cpp": LlamaCpp(arguments.gguf, arguments.num_threads)}
    for name in arguments.ours:
        kernels, dtype = name.split()
        engines[name] = Tandem(
            str(arguments.gguf), dtype, kernels, arguments.num_threads, max(arguments.streams)
        )
    report = Report("llama_cpp")
    measure_all(report, engines, arguments)
    report.finish(arguments.json)


def measure_all(report: Report, engines: dict[str, Engine], arguments: argparse.Namespace) -> None:
    """Engines take turns; the fastest of each one's tries counts."""
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    chance = random.Random(1)
    prompt = [chance.randrange(100, 40_000) for _ in range(PROMPT)]
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(3):
        for name, engine in engines.items():
            times[name].append(_seconds(clock, engine.prefill(prompt)))
    _add(report, f"prefill of {PROMPT}", PROMPT, times)
    for num_streams in arguments.streams:
        times = {name: [] for name in engines}
        for engine in engines.values():
            engine.start(num_streams)
        for step in range(1 + REPEATS.get(num_streams, 4)):
            for name, engine in engines.items():
                times[name].append(_seconds(clock, engine.decode(chance.randrange(100, 40_000), step)))
        _add(report, f"decode, {num_streams} streams", num_streams, times)


def _seconds(clock: Callable[[], float], work: Work) -> float:
    started_s = clock()
    work()
    return clock() - started_s


def _add(report: Report, case: str, num_tokens: int, times: dict[str, list[float]]) -> None:
    rates = {name: num_tokens / min(values[1:]) for name, values in times.items()}
    for name, rate in rates.items():
        report.add(f"{case}, {name}", "tokens/s", rate, "1/s", rates["llama.cpp"])


if __name__ == "__main__":
    main()
