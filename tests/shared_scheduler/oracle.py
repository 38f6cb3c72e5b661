"""Feeds a history recorded from DeepInfer's C++ scheduler to ours and compares every step."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(slots=True)
class Replay:
    """One history; `run` raises AssertionError at the first step that differs."""

    history: History

    def run(self) -> None:
        config = config_of(self.history["config"])
        scheduler = Scheduler(config, order=std_sort_descending)
        sequences: dict[int, Sequence] = {}
        seen: dict[int, list[object]] = {}
        for step in self.history["steps"]:
            for number, prompt_len, max_tokens, ignore_eos in step["arrivals"]:
                sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
                sequence = Sequence(str(number), [5] * prompt_len, sampling, block_size=config.block_size)
                scheduler.add_sequence(sequence, 0.0)
                sequences[number] = sequence
            outputs = scheduler.schedule()
            self._compare_decision(step, outputs)
            scheduler.process_outputs(outputs, np.array(step["tokens"], np.int64), now_s=0.0)
            assert scheduler.num_free_blocks == step["free_blocks"], self._where(step, "free blocks")
            changes = []
            for number, sequence in list(sequences.items()):
                state: list[object] = [sequence.status.name, sequence.num_tokens, sequence.cache.num_tokens]
                if seen.get(number) != state:
                    seen[number] = state
                    changes.append([number, *state])
                if sequence.is_finished:
                    del sequences[number]
            assert changes == step["changes"], f"{self._where(step, 'changes')}: {changes} {step['changes']}"

    def _compare_decision(self, step: dict[str, Any], outputs: SchedulerOutputs) -> None:
        ours = {
            "prompt_run": outputs.prompt_run,
            "scheduled": [int(sequence.request_id) for sequence in outputs.sequences],
            "seqlens_q": outputs.seqlens_q.tolist(),
            "seqlens_k": [] if outputs.batch is None else outputs.batch.seqlens_k.tolist(),
        }
        theirs = {name: step[name] for name in ours}
        assert ours == theirs, f"{self._where(step, 'decision')}\nours   {ours}\ntheirs {theirs}"

    def _where(self, step: dict[str, Any], what: str) -> str:
        return f"history {self.history['config']['seed']}, step {step['step']}: {what}"
