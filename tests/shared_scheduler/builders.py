"""Tiny builders, and a worker that behaves like a model without being one.

The worker keeps a paged pool of token ids, executes copies, writes and reads exactly where the batch says,
and derives every next token from the tokens it finds there. So a wrong table, slot, length, copy or order
changes an answer.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shared_scheduler import (
    Batch,
    EngineType,
    Scheduler,
    SchedulerConfig,
    SchedulerOutputs,
    Sequence,
    SequenceStatus,
    StepResults,
)
from wire.sampling import SamplingParams

EOS = 1
VOCABULARY = 40
HOLE = -7
"""In the pool: nothing was ever written here."""


def config(**changes: Any) -> SchedulerConfig:
    """8 blocks of 4 tokens, unless changed."""
    defaults: dict[str, Any] = {
        "engine_type": EngineType.NORMAL,
        "block_size": 4,
        "num_blocks": 9,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 32,
        "prefill_attempt_interval": 1,
        "prefill_any_attempt_interval": 3,
        "eos_token_ids": (EOS,),
    }
    return SchedulerConfig(**(defaults | changes))


def sequence(
    request_id: str, num_prompt_tokens: int, max_tokens: int = 100, block_size: int = 4, **changes: Any
) -> Sequence:
    """A request with the prompt 10, 11, 12, ..."""
    tokens = [10 + i % 20 for i in range(num_prompt_tokens)]
    sampling_fields = {"ignore_eos", "stop_token_ids", "seed", "prompt_logprobs"}
    sampling = SamplingParams(
        max_tokens=max_tokens, **{name: changes.pop(name) for name in sampling_fields & changes.keys()}
    )
    return Sequence(request_id, tokens, sampling, block_size=block_size, **changes)


def names(sequences: Many[Sequence]) -> list[str]:
    return [s.request_id for s in sequences]


def next_token(tokens: Many[int], seed: int) -> int:
    """The fake model: depends on every token before, on their number and on the seed."""
    value = 17 * seed + len(tokens)
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCABULARY


def expected_output(prompt: Many[int], sampling: SamplingParams, max_model_len: int) -> list[int]:
    """What any scheduler must produce for an undisturbed request."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens, sampling.seed))
        num_outputs = len(tokens) - len(prompt)
        is_eos = tokens[-1] == EOS and not sampling.ignore_eos
        if is_eos or tokens[-1] in sampling.stop_token_ids:
            return tokens[len(prompt) :]
        if len(tokens) > max_model_len or num_outputs == sampling.max_tokens:
            return tokens[len(prompt) :]


def state_of(tokens: Many[int]) -> int:
    """The fake recurrent state after these tokens."""
    value = 0
    for token in tokens:
        value = (value * 37 + token + 1) % 1_000_003
    return value


@dataclass(slots=True)
class FakeWorker:
    """Runs batches against a paged pool of token ids and a pool of states."""

    config: SchedulerConfig
    pool: npt.NDArray[np.int64] = field(init=False)
    salts: dict[int, str] = field(default_factory=dict)
    """Block -> salt of whoever wrote into it last."""
    states: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.pool = np.full(self.config.num_blocks * self.config.block_size, HOLE, np.int64)
        self.states = np.full(self.config.num_state_slots or 1, HOLE, np.int64)

    def run(self, outputs: SchedulerOutputs, batch: Batch) -> tuple[list[int], list[int]]:
        """Sampled ids, and the flat accepted list (-1: rejected)."""
        self.copy(outputs)
        assert not (batch.input_from_previous >= 0).any()
        self.pool[batch.slot_mapping] = batch.token_ids
        self._mark_salts(outputs, batch)
        sampled: list[int] = []
        accepted: list[int] = []
        at = 0
        for i, s in enumerate(outputs.sequences):
            q, k = int(batch.seqlens_q[i]), int(batch.seqlens_k[i])
            assert batch.positions[at : at + q].tolist() == list(range(k - q, k))
            tokens = self._read(batch, i, k)
            assert tokens[: k - q] == s.token_ids[: k - q] or not outputs.prompt_run, "a foreign prefix"
            assert HOLE not in tokens, f"{s!r} reads a position nobody wrote"
            self._advance_state(batch, i, tokens, q)
            drafts = [] if outputs.prompt_run else tokens[k - q + 1 :]
            taken = 0
            while (
                taken < len(drafts)
                and next_token(tokens[: k - q + 1 + taken], s.sampling.seed) == drafts[taken]
            ):
                taken += 1
            accepted += drafts[:taken] + [-1] * (len(drafts) - taken)
            sampled.append(next_token(tokens[: k - len(drafts) + taken], s.sampling.seed))
            at += q
        return sampled, accepted

    def copy(self, outputs: SchedulerOutputs) -> None:
        size = self.config.block_size
        for source, target in outputs.clone_blocks:
            if target:
                self.pool[target * size : (target + 1) * size] = self.pool[
                    source * size : (source + 1) * size
                ]
                self.salts[target] = self.salts[source]
        for source, target in outputs.clone_states:
            if target:
                self.states[target] = self.states[source]
        self.states[outputs.zero_states] = 0

    def receive(self, s: Sequence) -> None:
        """A transfer fills the blocks and the slot of a reserved sequence, but for the cached ones."""
        tokens, start = s.token_array(), s.cache.num_tokens
        slots = (
            s.cache.block_table[:, None] * self.config.block_size + np.arange(self.config.block_size)
        ).ravel()
        self.pool[slots[start : tokens.size]] = tokens[start:]
        assert self.pool[slots[: tokens.size]].tolist() == tokens.tolist(), "a foreign prefix"
        self.salts |= dict.fromkeys(
            s.cache.block_table[start // self.config.block_size :].tolist(), s.cache_salt
        )
        if s.cache.state_id is not None:
            self.states[s.cache.state_id] = state_of(tokens.tolist())

    def fill(self, block_ids: Many[int], tokens: Many[int], cache_salt: str) -> None:
        """A transfer fills whole blocks."""
        size = self.config.block_size
        for place, block in enumerate(block_ids):
            self.pool[block * size : (block + 1) * size] = tokens[place * size : (place + 1) * size]
            self.salts[block] = cache_salt

    def holds(self, block_ids: Many[int], tokens: Many[int], cache_salt: str) -> bool:
        """Are these the tokens in the blocks?"""
        slots = (
            np.array(block_ids)[:, None] * self.config.block_size + np.arange(self.config.block_size)
        ).ravel()
        return self.pool[slots].tolist() == list(tokens) and {self.salts[b] for b in block_ids} == {
            cache_salt
        }

    def _mark_salts(self, outputs: SchedulerOutputs, batch: Batch) -> None:
        owners = np.repeat(np.arange(batch.num_sequences), batch.seqlens_q)
        for slot, owner in zip(batch.slot_mapping.tolist(), owners.tolist(), strict=True):
            self.salts[slot // self.config.block_size] = outputs.sequences[owner].cache_salt
        for i, s in enumerate(outputs.sequences):
            blocks = batch.block_tables[i, : -(-int(batch.seqlens_k[i]) // self.config.block_size)].tolist()
            assert {self.salts[block] for block in blocks} == {s.cache_salt}, "a block of another salt"

    def _read(self, batch: Batch, i: int, k: int) -> list[int]:
        positions = np.arange(k)
        blocks = batch.block_tables[i, positions // self.config.block_size]
        tokens: list[int] = self.pool[
            blocks * self.config.block_size + positions % self.config.block_size
        ].tolist()
        return tokens

    def _advance_state(self, batch: Batch, i: int, tokens: list[int], q: int) -> None:
        slot = int(batch.state_slots[i])
        if not slot:
            return
        assert self.states[slot] == state_of(tokens[: len(tokens) - q]), (
            "the state is not that of the tokens before"
        )
        self.states[slot] = state_of(tokens)


def step(
    scheduler: Scheduler, worker: FakeWorker, now_s: float = 0.0
) -> tuple[SchedulerOutputs, StepResults]:
    """One synchronous step."""
    outputs = scheduler.schedule()
    scheduler.check_invariants()
    sampled: list[int] = []
    accepted: list[int] | None = None
    if outputs.batch is not None:
        sampled, flat = worker.run(outputs, outputs.batch)
        accepted = (
            flat
            if outputs.batch.num_tokens > outputs.batch.num_sequences and not outputs.prompt_run
            else None
        )
    results = scheduler.process_outputs(
        outputs,
        np.array(sampled, np.int64),
        None if accepted is None else np.array(accepted, np.int64),
        now_s=now_s,
    )
    scheduler.check_invariants()
    return outputs, results


def drain(scheduler: Scheduler, worker: FakeWorker, max_steps: int = 2000) -> list[Sequence]:
    """Step until nothing is left to do; everything that ended, in order."""
    ended: list[Sequence] = []
    for _ in range(max_steps):
        if not scheduler.has_work():
            return ended
        outputs, results = step(scheduler, worker)
        ended += [*outputs.finished, *outputs.ignored, *results.finished]
        for s in results.prompts_done:
            scheduler.release_handover(s)
    raise AssertionError(f"not drained after {max_steps} steps")


def run_ids(scheduler: Scheduler, token_id: int = 7) -> tuple[SchedulerOutputs, StepResults]:
    """One synchronous step in which every sequence samples the same id."""
    outputs = scheduler.schedule()
    results = scheduler.process_outputs(
        outputs, np.full(len(outputs.sequences), token_id, np.int64), now_s=0.0
    )
    scheduler.check_invariants()
    return outputs, results


UNDISTURBED = (SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_LENGTH_CAPPED)
