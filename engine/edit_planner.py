"""Which logits a step changes before it draws, for requests that ask for more than a plain draw."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.choices import FirstDraws
from engine.grammars import apply_bitmask
from engine.histories import HistoryUpdate
from engine.logit_edits import LogitEdits
from shared_scheduler import Batch, Cohort
from wire.sampling import SamplingParams

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Draws:
    """The rows of a step in which one sequence draws, and what it has drawn before each of them."""

    rows: list[int]
    output_index: int
    """Of the first of them."""
    uncommitted: tuple[int, ...]
    """Drawn before the first row but not committed yet."""
    drafts: tuple[int, ...] = ()
    """One row more for each. Empty where several choices draw from one sequence's logits."""

    def before(self, place: int) -> tuple[int, ...]:
        """Tokens that stand behind the committed ones where the row at `place` draws."""
        return self.uncommitted + self.drafts[: min(place, len(self.drafts))]

    def index_at(self, place: int) -> int:
        return self.output_index + min(place, len(self.drafts))


@dataclass(frozen=True, slots=True)
class _FixedEdits:
    """What one sequence changes in every step, as arrays."""

    index: int
    biased: Int64Array
    biases: Float32Array
    ends: Int64Array
    """Not to be drawn before `min_tokens`."""
    min_tokens: int


class EditPlanner:
    """Plans one step at a time, in launch order."""

    def __init__(self, eos_token_ids: Items[int]) -> None:
        self._eos = tuple(eos_token_ids)
        self._cohort: Cohort | None = None
        self._fixed: list[_FixedEdits] = []

    def plan(
        self,
        cohort: Cohort,
        batch: Batch,
        draws: FirstDraws,
        updates: Items[HistoryUpdate],
        uncommitted: dict[int, tuple[int, ...]],
    ) -> LogitEdits | None:
        """None: nothing is changed. `uncommitted`: by index in the step, what `_Draws` says."""
        if cohort is not self._cohort:
            self._cohort = cohort
            params = [(i, sequence.sampling) for i, sequence in enumerate(cohort.sequences)]
            self._fixed = [self._fixed_edits(i, p) for i, p in params if p.logit_bias or p.min_tokens]
        if not (self._fixed or updates):
            return None
        edits, places = LogitEdits(), _Places(batch, draws, uncommitted)
        for fixed in self._fixed:
            self._edit_fixed(edits, places.of(fixed.index), fixed)
        for update in updates:
            self._edit_by_history(edits, places.of(update.index), update)
        return edits

    def _fixed_edits(self, index: int, sampling: SamplingParams) -> _FixedEdits:
        ends = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos))
        return _FixedEdits(
            index,
            np.array([token_id for token_id, _ in sampling.logit_bias], np.int64),
            np.array([bias for _, bias in sampling.logit_bias], np.float32),
            np.array(ends, np.int64),
            sampling.min_tokens,
        )

    def _edit_fixed(self, edits: LogitEdits, draws: _Draws, fixed: _FixedEdits) -> None:
        for place, row in enumerate(draws.rows):
            if fixed.biased.size:
                edits.bias(row, fixed.biased, fixed.biases)
            if draws.index_at(place) < fixed.min_tokens and fixed.ends.size:
                edits.ban(row, fixed.ends)

    def _edit_by_history(self, edits: LogitEdits, draws: _Draws, update: HistoryUpdate) -> None:
        history, sampling = update.history, update.sampling
        if sampling.has_penalties:
            assert history.counts is not None, "an update was committed before"
            for place, row in enumerate(draws.rows):
                more = draws.before(place)
                counts = history.counts.with_more(more) if more else history.counts
                edits.penalise(row, counts.token_ids, counts.counts, sampling)
        if history.matcher is not None and not history.has_failed:
            masks = history.matcher.masks(draws.before(len(draws.drafts)))[len(draws.uncommitted) :]
            for place, row in enumerate(draws.rows):
                mask = masks[min(place, len(draws.drafts))]
                if mask is not None:
                    edits.mask(row, mask, apply_bitmask)


class _Places:
    """Where each sequence of a step draws."""

    def __init__(self, batch: Batch, draws: FirstDraws, uncommitted: dict[int, tuple[int, ...]]) -> None:
        self._batch = batch
        self._extra = draws.logit_rows.tolist()
        self._uncommitted = uncommitted
        self._ends = np.cumsum(batch.seqlens_q).tolist() if batch.has_drafts else []

    def of(self, index: int) -> _Draws:
        batch = self._batch
        output_index, before = int(batch.output_indices[index]), self._uncommitted.get(index, ())
        if batch.has_drafts:
            end = self._ends[index]
            start = end - int(batch.seqlens_q[index])
            drafts = tuple(batch.token_ids[start + 1 : end].tolist())
            return _Draws(list(range(start, end)), output_index, before, drafts)
        extra = [batch.num_sequences + i for i, row in enumerate(self._extra) if row == index]
        return _Draws([index, *extra], output_index, before)
