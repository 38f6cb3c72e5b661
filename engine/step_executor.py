"""Runs the model on scheduled steps: in the engine thread, or in a worker thread beside it.

A step goes through
1. launch    the engine thread hands over what the scheduler decided
2. copies    clones and zeroes of pool rows that the step relies on
3. inputs    tokens that the step before it has sampled take their places in the batch
4. forward, sample, verify drafts
5. result    the engine thread takes what was drawn, or the exception that ended the step

Steps run one after the other in launch order, so a step sees everything that earlier ones wrote.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.choices import NO_DRAWS, FirstDraws
from engine.copies import execute_copies, has_copies
from engine.draw_rows import DrawRows
from engine.edit_planner import EditPlanner
from engine.histories import HistoryUpdate
from engine.model_runner import Runner
from engine.prompt_logprobs import PromptSpan, ScoredSpan, rows_of, score_spans
from engine.sampler import Int32Array, Int64Array, SampledTokens, Sampler
from engine.verification import Verified, verify
from shared_scheduler import Batch, SchedulerOutputs


@dataclass(frozen=True, slots=True, eq=False)
class StepOutcome:
    """What a step of N sequences has drawn."""

    drawn: SampledTokens
    """One token per sequence, and behind them those of the step's `FirstDraws`; in a step with drafts one
    token behind each of the batch."""
    first_rows: Int64Array
    """[N]: where in `drawn` each sequence's tokens begin."""
    verified: Verified | None = None
    """What became of the drafts, if there were any."""
    failed: tuple[int, ...] = ()
    """Sequences with a token that their grammar does not allow, or with none that it allows next."""
    scored: tuple[ScoredSpan, ...] = ()
    """What was asked for of the prompts' own tokens."""
    forward_s: float = 0.0
    sampler_s: float = 0.0

    @property
    def token_ids(self) -> Int64Array:
        """[N or more]: the newest token of each sequence."""
        return self.drawn.token_ids if self.verified is None else self.verified.token_ids

    def tokens_of(self, index: int) -> tuple[int, ...]:
        """What the step has given the sequence at `index`; -1: it was not in the step."""
        if index < 0:
            return ()
        start, num_tokens = int(self.first_rows[index]), 1
        if self.verified is not None:
            num_tokens += int(self.verified.num_accepted[index])
        return tuple(self.drawn.token_ids[start : start + num_tokens].tolist())

    @property
    def accepted(self) -> Int64Array | None:
        return None if self.verified is None else self.verified.accepted

    @property
    def num_rejected(self) -> Int32Array | None:
        return None if self.verified is None else self.verified.num_rejected


NOTHING_DRAWN = StepOutcome(SampledTokens(np.empty(0, np.int64), None), np.empty(0, np.int64))


class ModelStep:
    """Stages 2 to 4 for one model and its pools."""

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        eos_token_ids: Items[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._clock = clock
        self._rows = DrawRows()
        self._edits = EditPlanner(eos_token_ids)

    def run(
        self,
        outputs: SchedulerOutputs,
        draws: FirstDraws,
        updates: Items[HistoryUpdate],
        spans: Items[PromptSpan],
        previous: StepOutcome | None,
    ) -> StepOutcome:
        """`previous`: what the last step that had a batch has drawn, if this batch may need it."""
        execute_copies(outputs.copies, self._runner.kv_shards, self._runner.states)
        batch, uncommitted = outputs.batch, dict[int, tuple[int, ...]]()
        if batch is None:
            if has_copies(outputs.copies):  # a hand-over may read them next; nothing else waits for them here
                for kv_pool in self._runner.kv_shards:
                    kv_pool.wait()
            return NOTHING_DRAWN
        if (batch.input_from_previous >= 0).any():
            assert previous is not None
            sources = batch.input_from_previous
            uncommitted = {u.index: previous.tokens_of(int(sources[u.index])) for u in updates}
            batch = batch.resolve_inputs(previous.token_ids, previous.num_rejected)
        started_s = self._clock()
        logits, scored = self._logits(batch, draws, spans)
        computed_s = self._clock()
        for update in updates:
            update.history.commit(update)
        edits = self._edits.plan(outputs.cohort, batch, draws, updates, uncommitted)
        drawn = self._sampler.sample(logits, self._rows.of(outputs.cohort, batch, draws), edits)
        verified = verify(batch, drawn.token_ids) if batch.has_drafts else None
        ends = np.cumsum(batch.seqlens_q, dtype=np.int64)
        dead = dead_ends_of(batch, draws, drawn, verified)
        return StepOutcome(
            drawn,
            np.arange(ends.size) if verified is None else ends - batch.seqlens_q,
            verified,
            tuple(u.index for u in updates if u.history.has_failed or (u.index in dead and u.is_structured)),
            scored,
            computed_s - started_s,
            self._clock() - computed_s,
        )

    def _logits(
        self, batch: Batch, draws: FirstDraws, spans: Items[PromptSpan]
    ) -> tuple[torch.Tensor, tuple[ScoredSpan, ...]]:
        """One row for every token that is drawn, and what `spans` ask for."""
        if batch.has_drafts:
            return self._runner.forward(batch, np.arange(batch.num_tokens)), ()
        logits, scored = self._scored(batch, spans) if spans else (self._runner.forward(batch), ())
        if draws.sampling:
            logits = torch.cat((logits, logits[torch.from_numpy(draws.logit_rows)]))
        return logits, scored

    def _scored(self, batch: Batch, spans: Items[PromptSpan]) -> tuple[torch.Tensor, tuple[ScoredSpan, ...]]:
        rows = rows_of(batch, spans)
        logits = self._runner.forward(batch, rows)
        last = np.searchsorted(rows, np.cumsum(batch.seqlens_q) - 1)
        return logits[torch.from_numpy(last)], score_spans(logits, rows, spans)


def dead_ends_of(
    batch: Batch, draws: FirstDraws, drawn: SampledTokens, verified: Verified | None
) -> frozenset[int]:
    """Sequences of the step for whose tokens there was a row with nothing to draw.

    What was drawn behind a rejected draft counts for nothing, a dead end neither.
    """
    if not drawn.dead_ends:
        return frozenset()
    rows = np.array(drawn.dead_ends, np.intp)
    if verified is None:
        owners = np.append(np.arange(batch.num_sequences), draws.logit_rows)
        return frozenset(owners[rows].tolist())
    owners = np.repeat(np.arange(batch.num_sequences), batch.seqlens_q)[rows]
    counts = batch.places[rows] <= verified.num_accepted[owners]
    return frozenset(owners[counts].tolist())


class StepExecutor(Protocol):
    """Takes steps in order; called by the engine thread only."""

    @property
    def num_ahead(self) -> int:
        """Launched steps that may run on while the next one is scheduled."""

    def launch(
        self,
        outputs: SchedulerOutputs,
        draws: FirstDraws = NO_DRAWS,
        updates: Items[HistoryUpdate] = (),
        spans: Items[PromptSpan] = (),
    ) -> Future[StepOutcome]:
        """The future's `result()` waits for the step and raises what the step raised."""

    def close(self) -> None:
        """Wait for the step that runs; drop those behind it."""


class SynchronousExecutor:
    """A step has run when `launch` returns."""

    num_ahead = 0

    def __init__(self, step: ModelStep) -> None:
        self._step = step

    def launch(
        self,
        outputs: SchedulerOutputs,
        draws: FirstDraws = NO_DRAWS,
        updates: Items[HistoryUpdate] = (),
        spans: Items[PromptSpan] = (),
    ) -> Future[StepOutcome]:
        done: Future[StepOutcome] = Future()
        done.set_result(self._step.run(outputs, draws, updates, spans, None))
        return done

    def close(self) -> None:
        pass


class OverlappedExecutor:
    """Steps run in one worker thread; results are processed one step late."""

    num_ahead = 1

    def __init__(self, step: ModelStep) -> None:
        self._step = step
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self._previous: Future[StepOutcome] | None = None
        """The last launched step that has a batch."""

    def launch(
        self,
        outputs: SchedulerOutputs,
        draws: FirstDraws = NO_DRAWS,
        updates: Items[HistoryUpdate] = (),
        spans: Items[PromptSpan] = (),
    ) -> Future[StepOutcome]:
        future = self._worker.submit(self._run, outputs, draws, updates, spans, self._previous)
        if outputs.batch is not None:
            self._previous = future
        return future

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _run(
        self,
        outputs: SchedulerOutputs,
        draws: FirstDraws,
        updates: Items[HistoryUpdate],
        spans: Items[PromptSpan],
        previous: Future[StepOutcome] | None,
    ) -> StepOutcome:
        """A step behind one that failed fails in the same way: its inputs do not exist."""
        resolved = None if previous is None else previous.result()
        return self._step.run(outputs, draws, updates, spans, resolved)
