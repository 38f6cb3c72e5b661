"""Drafts from a small model that writes on by itself, with keys and values of its own.

1. compare   what the model was fed of a sequence with what the sequence has now: what both begin with stays
             computed, everything behind it is computed again. So rejected drafts, preemption, forks, replay
             and a slot's new owner need no undoing
2. catch up  a sequence whose prompt the model has not read (on a completion engine: every new one) is read at
             most CATCH_UP_TOKENS in a call; it gets drafts once it is read
3. draft     tokens are drawn as the target draws them, with the request's parameters and noise, because
             equal noise gives near distributions equal tokens; what was drafted counts as fed
4. learn     what came of every guess, by how sure the model was, says what the next ones are worth; where
             the time of drafting is not paid back nothing is drafted, but now and then, to see whether it is
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.drafters import NO_DRAFTS, DraftContext, Drafts
from engine.draw_rows import sampling_rows
from engine.model_runner import Runner
from engine.sampler import NO_LOGPROBS, Sampler
from shared_scheduler import Batch
from shared_scheduler.step_time import StepTimeModel

CATCH_UP_TOKENS = 256
"""In one call: a step waits for it."""
RETRY_CALLS = 32
"""Calls without drafts after which one is made to see whether they pay now."""
SURENESS = (0.4, 0.7, 0.9)
"""Bounds between the kinds of guesses that are told apart: the probability of the likeliest token."""
FORGETTING = 0.98
PRIOR_RATES, PRIOR_WEIGHT = np.array([0.3, 0.5, 0.7, 0.9]), 4.0

Int32Array = npt.NDArray[np.int32]
Float64Array = npt.NDArray[np.float64]


class DecodeTimes(Protocol):
    """The scheduler's view of what decode steps cost."""

    def predict_decode_s(self, num_sequences: int, num_tokens: int) -> float | None:
        """Seconds of a step; None until steps were measured."""


@dataclass(slots=True)
class _Slot:
    """What the model holds of one sequence."""

    fed: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    """Tokens whose keys and values are in `blocks`."""
    blocks: list[int] = field(default_factory=list)
    used: int = 0
    """The call that last needed it."""
    guess_at: int = 0
    guess: tuple[int, ...] = ()
    kinds: tuple[int, ...] = ()


@dataclass(slots=True)
class _Work:
    """One sequence in one call."""

    context: DraftContext
    slot: _Slot
    tokens: Int32Array
    """Committed ones and those that a step in flight verifies."""
    drafted: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)

    @property
    def num_missing(self) -> int:
        return self.tokens.size - self.slot.fed.size


class DraftModel:
    """The `Drafter` over a model of its own. Called by the engine thread only."""

    def __init__(
        self,
        runner: Runner,
        times: DecodeTimes,
        *,
        num_slots: int,
        vocab_size: int,
        max_len: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`vocab_size`: of the target; `max_len`: positions that the draft model has."""
        assert runner.states is None, "a state cannot be wound back"
        self._runner = runner
        self._times = times
        self._clock = clock
        self._vocab_size = min(vocab_size, runner.config.vocab_size)
        self._max_len = max_len
        self._sampler = Sampler()
        self._block_size = runner.kv_pool.layout.block_size
        self._free = list(range(runner.kv_pool.num_blocks - 1, 0, -1))
        self._slots = [_Slot() for _ in range(num_slots)]
        self._rates = GuessRates()
        self._own_time = StepTimeModel()
        self._logits = torch.empty(0)
        self._logit_rows: dict[int, int] = {}
        """By `id` of a work: its row of `_logits`."""
        self._call = 0
        self._num_idle = 0
        """Calls in a row in which drafting did not seem to pay."""

    def propose(self, contexts: Items[DraftContext], num_tokens: int) -> list[Drafts]:
        self._call += 1
        for context in contexts:
            self._slot(context).used = self._call
        works = [self._work(context, num_tokens) for context in contexts]
        num_ready = sum(work is not None for work in works)
        num_drafts = self._num_worth(num_ready, num_tokens)
        if num_ready and num_drafts:
            self._draft([work for work in works if work is not None], num_drafts)
        return [NO_DRAFTS if work is None else self._result(work, num_drafts) for work in works]

    def check_invariants(self) -> None:
        held = [block for slot in self._slots for block in slot.blocks]
        assert sorted(held + self._free) == list(range(1, self._runner.kv_pool.num_blocks))
        for slot in self._slots:
            assert slot.fed.size <= len(slot.blocks) * self._block_size

    # ----- one call

    def _work(self, context: DraftContext, num_tokens: int) -> _Work | None:
        """None where nothing can be drafted: too long, an unknown token, no room."""
        slot, committed = self._slot(context), context.sequence.token_array()
        self._learn(slot, committed)
        tokens = np.append(committed, np.array(context.in_flight or (), np.int32))
        num_ahead = num_tokens + 1 + (context.in_flight is not None)
        keep = min(_common_prefix(slot.fed, tokens), tokens.size - 1)
        slot.fed = slot.fed[:keep]
        if tokens.size + num_ahead > self._max_len or int(tokens[keep:].max()) >= self._vocab_size:
            return None
        if not self._make_room(slot, tokens.size + num_ahead):
            return None
        return _Work(context, slot, tokens)

    def _slot(self, context: DraftContext) -> _Slot:
        number = context.sequence.draft.info_slot
        assert number is not None, "the scheduler gives every running sequence a draft slot"
        return self._slots[number]

    def _num_worth(self, num_sequences: int, limit: int) -> int:
        """Drafts per sequence that give most tokens per second of drafting and verifying."""
        counts = np.arange(limit + 1)
        expected = num_sequences * np.cumsum(self._rates.overall() ** counts)
        seconds = np.zeros(limit + 1)
        for count in counts.tolist():
            step_s = self._times.predict_decode_s(num_sequences, num_sequences * (1 + count))
            if step_s is None or not self._own_time.is_fitted:
                return limit  # nothing is known yet
            own_s = self._own_time.predict_s(0, np.array([num_sequences]))[0]
            seconds[count] = step_s + count * float(own_s)
        best = int((expected / seconds).argmax())
        if best:
            self._num_idle = 0
            return best
        self._num_idle += 1
        return 1 if self._num_idle % RETRY_CALLS == 0 else 0

    def _draft(self, works: list[_Work], num_drafts: int) -> None:
        ready = self._catch_up(works)
        while ready:
            self._draw(ready)
            ready = [work for work in ready if len(work.drafted) < num_drafts + _num_skipped(work)]
            if ready:
                self._feed([(work, 1) for work in ready])

    def _catch_up(self, works: list[_Work]) -> list[_Work]:
        """Feed what is missing, within limits; those of which nothing is missing any more are ready."""
        left, chunks = CATCH_UP_TOKENS, list[tuple[_Work, int]]()
        for work in sorted(works, key=lambda work: work.num_missing):
            count = min(work.num_missing, left)
            left -= count
            if count:
                chunks.append((work, count))
        self._feed(chunks)
        return [work for work, _ in chunks if not work.num_missing]

    def _feed(self, chunks: list[tuple[_Work, int]]) -> None:
        """Compute the next tokens of each; `_logits` are those behind the last of them."""
        started_s = self._clock()
        logits = self._runner.forward(self._batch(chunks))
        self._logit_rows = {id(work): row for row, (work, _) in enumerate(chunks)}
        self._logits = logits[:, : self._vocab_size]
        self._own_time.observe(0, sum(count for _, count in chunks), self._clock() - started_s, 0.0)
        for work, count in chunks:
            work.slot.fed = work.tokens[: work.slot.fed.size + count]

    def _draw(self, works: list[_Work]) -> None:
        """One token more for each, as the target would draw it."""
        rows = torch.tensor([self._logit_rows[id(work)] for work in works])
        logits = self._logits[rows]
        sureness = logits.softmax(dim=-1).amax(dim=-1).numpy()
        params = [work.context.sequence.sampling for work in works]
        indices = [work.tokens.size - work.context.sequence.num_prompt_tokens for work in works]
        how = sampling_rows(params, np.array(indices, np.int32))
        how = replace(how, num_logprobs=np.full(len(works), NO_LOGPROBS, np.int32))
        drawn = self._sampler.sample(logits, how).token_ids
        for work, token_id, kind in zip(works, drawn.tolist(), np.digitize(sureness, SURENESS), strict=True):
            work.drafted.append(token_id)
            work.kinds.append(int(kind))
            work.tokens = np.append(work.tokens, np.int32(token_id))

    def _batch(self, chunks: list[tuple[_Work, int]]) -> Batch:
        size = self._block_size
        starts = np.array([work.slot.fed.size for work, _ in chunks], np.int32)
        lengths = np.array([count for _, count in chunks], np.int32)
        tables = np.zeros((len(chunks), max(len(work.slot.blocks) for work, _ in chunks)), np.int32)
        for row, (work, _) in enumerate(chunks):
            tables[row, : len(work.slot.blocks)] = work.slot.blocks
        owners = np.repeat(np.arange(len(chunks)), lengths)
        places = np.arange(owners.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        positions = (starts[owners] + places).astype(np.int32)
        none = np.zeros(len(chunks), np.int32)
        return Batch(
            is_prompt=True,
            block_size=size,
            token_ids=np.concatenate(
                [work.tokens[work.slot.fed.size :][:count] for work, count in chunks]
            ).astype(np.int32),
            positions=positions,
            slot_mapping=(tables[owners, positions // size] * size + positions % size).astype(np.int32),
            seqlens_q=lengths,
            seqlens_k=starts + lengths,
            block_tables=np.ascontiguousarray(tables[:, : -(-int((starts + lengths).max()) // size)]),
            state_slots=none,
            output_indices=none,
            input_from_previous=none - 1,
        )

    # ----- what became of guesses

    def _result(self, work: _Work, num_drafts: int) -> Drafts:
        num_skipped = _num_skipped(work)
        if len(work.drafted) < num_drafts + num_skipped or not num_drafts:
            return NO_DRAFTS
        slot = work.slot
        slot.guess_at = work.tokens.size - len(work.drafted)
        slot.guess, slot.kinds = tuple(work.drafted), tuple(work.kinds)
        chances = self._rates.of(work.kinds)
        if num_skipped:
            chances[1] *= chances[0]
        return Drafts(slot.guess[num_skipped:], tuple(chances[num_skipped:].tolist()))

    def _learn(self, slot: _Slot, committed: Int32Array) -> None:
        """Compare the last guess with what has come since."""
        guess, slot.guess = slot.guess, ()
        if not guess or _common_prefix(slot.fed, committed) < slot.guess_at:
            return  # a guess behind drafts that were wrong, or of the slot's former owner
        come = committed[slot.guess_at :][: len(guess)].tolist()
        for token_id, expected, kind in zip(come, guess, slot.kinds, strict=False):
            self._rates.add(kind, token_id == expected)
            if token_id != expected:
                return

    # ----- room

    def _make_room(self, slot: _Slot, num_tokens: int) -> bool:
        """Blocks for so many tokens; those come from slots that nobody asked for in this call."""
        missing = -(-num_tokens // self._block_size) - len(slot.blocks)
        while missing > len(self._free):
            others = [other for other in self._slots if other.blocks and other.used < self._call]
            if not others:
                return False
            self._empty(min(others, key=lambda other: other.used))
        slot.blocks += [self._free.pop() for _ in range(missing)]
        return True

    def _empty(self, slot: _Slot) -> None:
        self._free += slot.blocks
        slot.blocks, slot.fed, slot.guess = [], slot.fed[:0], ()


class GuessRates:
    """The share of guesses that came true, by how sure the model was; old ones fade."""

    def __init__(self) -> None:
        self._right = PRIOR_WEIGHT * PRIOR_RATES
        self._made = np.full(PRIOR_RATES.size, PRIOR_WEIGHT)

    def add(self, kind: int, is_right: bool) -> None:
        self._made[kind] = FORGETTING * self._made[kind] + 1.0
        self._right[kind] = FORGETTING * self._right[kind] + is_right

    def of(self, kinds: Items[int]) -> Float64Array:
        rates: Float64Array = self._right / self._made
        return rates[list(kinds)]

    def overall(self) -> float:
        """Of the next guess, whatever its kind will be."""
        return float(self._right.sum() / self._made.sum())


def _num_skipped(work: _Work) -> int:
    """Tokens of the guess that a step in flight draws itself."""
    return int(work.context.in_flight is not None)


def _common_prefix(one: Int32Array, other: Int32Array) -> int:
    size = min(one.size, other.size)
    different = np.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if different.size else size
