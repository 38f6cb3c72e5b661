"""Feeds a history recorded from DeepInfer's C++ scheduler to ours and compares every step."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shared_scheduler import EngineType, Scheduler, SchedulerConfig, SchedulerOutputs, Sequence
from tests.shared_scheduler.std_sort import std_sort_descending
from wire.sampling import SamplingParams

History = dict[str, Any]


def read_histories(path: Path) -> Iterator[History]:
    with gzip.open(path, "rt") as lines:
        yield from map(json.loads, lines)


def config_of(recorded: dict[str, Any]) -> SchedulerConfig:
    """The recorded configuration with the reference's own preemption rule."""
    return SchedulerConfig(
        engine_type=EngineType[recorded["engine"]],
        block_size=recorded["block_size"],
        num_blocks=recorded["num_blocks"],
        num_state_slots=recorded["num_state_slots"],
        max_num_seqs=recorded["max_num_seqs"],
        max_num_batched_tokens=recorded["max_num_batched_tokens"],
        max_model_len=recorded["max_model_len"],
        chunked_prefill=recorded["chunked_prefill"],
        stop_preempted_request=recorded["stop_preempted_request"],
        prefill_attempt_interval=recorded["prefill_attempt_interval"],
        prefill_any_attempt_interval=recorded["prefill_any_attempt_interval"],
        lookahead_tokens=recorded["lookahead_tokens"],
        cp_size=recorded["cp_size"],
        eos_token_ids=(recorded["eos_token_id"],),
        preempt_only_on_need=False,
    )


class Replay:
    """One history; `run` raises AssertionError at the first step that differs."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._config = config_of(history["config"])
        self._scheduler = Scheduler(self._config, order=std_sort_descending)
        self._live: dict[int, Sequence] = {}
        self._seen: dict[int, list[object]] = {}

    def run(self) -> None:
        for step in self._history["steps"]:
            for arrival in step["arrivals"]:
                self._add(*arrival)
            outputs = self._scheduler.schedule()
            self._compare_decision(step, outputs)
            self._scheduler.process_outputs(outputs, np.array(step["tokens"], np.int64), now_s=0.0)
            assert self._scheduler.num_free_blocks == step["free_blocks"], self._where(step, "free blocks")
            assert self._changes() == step["changes"], self._where(step, "changes")

    def _add(self, number: int, prompt_length: int, max_tokens: int, ignore_eos: bool) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
        sequence = Sequence(str(number), [5] * prompt_length, sampling, block_size=self._config.block_size)
        self._scheduler.add_sequence(sequence, 0.0)
        self._live[number] = sequence

    def _compare_decision(self, step: History, outputs: SchedulerOutputs) -> None:
        ours = {
            "prompt_run": outputs.prompt_run,
            "scheduled": [int(sequence.request_id) for sequence in outputs.sequences],
            "seqlens_q": outputs.seqlens_q.tolist(),
            "seqlens_k": [] if outputs.batch is None else outputs.batch.seqlens_k.tolist(),
        }
        assert ours == {name: step[name] for name in ours}, self._where(step, "decision")

    def _changes(self) -> list[list[object]]:
        """Status, length and cached tokens of every sequence that differs from the step before."""
        changes: list[list[object]] = []
        for number, sequence in list(self._live.items()):
            state: list[object] = [sequence.status.name, sequence.num_tokens, sequence.cache.num_tokens]
            if self._seen.get(number) != state:
                self._seen[number] = state
                changes.append([number, *state])
            if sequence.is_finished:
                del self._live[number]
        return changes

    def _where(self, step: History, what: str) -> str:
        return f"history {self._history['config']['seed']}, step {step['step']}: {what}"
