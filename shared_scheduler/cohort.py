"""What stays the same from step to step while a batch keeps its members."""

from dataclasses import dataclass

import numpy as np

from shared_scheduler.rows import Int32Array, RowIndices, SequenceRows
from shared_scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Cohort:
    """The members of a batch, in batch order, and their fixed numbers, int32[N] each.

    The arrays are shared by all steps of the same members: read them, do not write to them.
    """

    sequences: tuple[Sequence, ...]
    rows: RowIndices
    num_prompt_tokens: Int32Array
    end_lengths: Int32Array
    state_slots: Int32Array
    ones: Int32Array
    minus_ones: Int32Array


class CohortCache:
    """Builds cohorts, and returns the last one while the array of rows is the very same object."""

    def __init__(self, rows: SequenceRows) -> None:
        self._rows = rows
        self._last = self.of(np.empty(0, np.intp), ())

    def of(self, members: RowIndices, sequences: tuple[Sequence, ...] | None = None) -> Cohort:
        rows = self._rows
        return Cohort(
            tuple(rows.owners[members].tolist()) if sequences is None else sequences,
            members,
            rows.num_prompt_tokens[members],
            rows.end_length[members],
            rows.state_slot[members],
            np.ones(members.size, np.int32),
            np.full(members.size, -1, np.int32),
        )

    def again(self, members: RowIndices) -> Cohort:
        if members is not self._last.rows:
            self._last = self.of(members)
        return self._last
