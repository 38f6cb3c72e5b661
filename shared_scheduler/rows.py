"""What changes in every step, kept as numpy columns: one row per sequence that holds blocks.

A sequence gets a row together with its blocks and gives both back together. While it has a row, its
lengths, block table and newest tokens live here and nowhere else; `Sequence` and its ledgers read them
through the row. A step then touches whole columns instead of objects.
"""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shared_scheduler.errors import CorruptionError

if TYPE_CHECKING:
    from shared_scheduler.sequence import Sequence

Int32Array = npt.NDArray[np.int32]
RowIndices = npt.NDArray[np.intp]

NEW_TOKENS_WIDTH = 512
"""Newest tokens that wait in a row before they move, all at once, to the sequence's own array."""

NO_ROW = -1

COLUMNS = (
    "num_tokens",  # committed tokens
    "num_prompt_tokens",
    "end_length",  # the sequence ends when it has this many tokens
    "has_stop_ids",  # 1: the request names stop tokens of its own
    "uncached",  # committed tokens whose KV is not owned; 1 for every sequence that decodes
    "inflight",  # tokens launched and not yet answered, all steps
    "last_inflight",  # of these, those of the newest step
    "last_token",
    "num_blocks",
    "state_slot",  # 0: none
    "new_base",  # token number t is in new_tokens[row, t - new_base] until the sequence stores it
)


class SequenceRows:
    """Columns int32[capacity], tables int32[capacity, width] (0 beyond a row's blocks); grows by doubling."""

    num_tokens: Int32Array
    num_prompt_tokens: Int32Array
    end_length: Int32Array
    has_stop_ids: Int32Array
    uncached: Int32Array
    inflight: Int32Array
    last_inflight: Int32Array
    last_token: Int32Array
    num_blocks: Int32Array
    state_slot: Int32Array
    new_base: Int32Array

    def __init__(self, capacity: int, width: int, max_width: int) -> None:
        self._max_width = max_width
        self._columns = np.zeros((len(COLUMNS), capacity), np.int32)
        self.tables = np.zeros((capacity, min(width, max_width)), np.int32)
        self.new_tokens = np.zeros((capacity, NEW_TOKENS_WIDTH), np.int32)
        self.owners: npt.NDArray[np.object_] = np.full(capacity, None, object)
        self._free = list(range(capacity - 1, -1, -1))
        self._name_columns()

    @property
    def capacity(self) -> int:
        return int(self._columns.shape[1])

    @property
    def num_taken(self) -> int:
        return self.capacity - len(self._free)

    def taken(self) -> RowIndices:
        """Rows in use, ascending."""
        mask = np.ones(self.capacity, bool)
        mask[self._free] = False
        return np.flatnonzero(mask)

    def take(self, owner: "Sequence") -> int:
        """A row of zeros for `owner`."""
        if not self._free:
            self._double()
        row = self._free.pop()
        self._columns[:, row] = 0
        self.num_tokens[row] = owner.num_stored
        # Rows start at different places, so that they do not all have to be emptied in the same step.
        self.new_base[row] = owner.num_stored - row * 149 % NEW_TOKENS_WIDTH
        self.owners[row] = owner
        return row

    def give_back(self, row: int) -> None:
        if self.owners[row] is None:
            raise CorruptionError(f"row {row} given back twice")
        self.tables[row, : self.num_blocks[row]] = 0
        self.owners[row] = None
        self._free.append(row)

    def table(self, row: int) -> Int32Array:
        """The row's block table; a view."""
        return self.tables[row, : self.num_blocks[row]]

    def append_blocks(self, row: int, block_ids: Int32Array) -> None:
        start = int(self.num_blocks[row])
        end = start + block_ids.size
        self.ensure_width(end)
        self.tables[row, start:end] = block_ids
        self.num_blocks[row] = end

    def append_block_each(self, rows: RowIndices, block_ids: Int32Array) -> None:
        """One block to each of distinct rows."""
        at = self.num_blocks[rows]
        self.ensure_width(int(at.max()) + 1)
        self.tables.reshape(-1)[rows * self.tables.shape[1] + at] = block_ids
        self.num_blocks[rows] = at + 1

    def cut_blocks(self, row: int, num_blocks: int) -> Int32Array:
        """Shorten the table to `num_blocks` and return the ids cut off."""
        cut = self.tables[row, num_blocks : self.num_blocks[row]].copy()
        self.tables[row, num_blocks : self.num_blocks[row]] = 0
        self.num_blocks[row] = num_blocks
        return cut

    def ensure_width(self, width: int) -> None:
        if width <= self.tables.shape[1]:
            return
        if width > self._max_width:
            raise CorruptionError(
                f"a table of {width} blocks, above the {self._max_width} a sequence can need"
            )
        wider = np.zeros(
            (self.capacity, min(max(width, 2 * self.tables.shape[1]), self._max_width)), np.int32
        )
        wider[:, : self.tables.shape[1]] = self.tables
        self.tables = wider

    def append_token(self, row: int, token_id: int) -> None:
        at = int(self.num_tokens[row] - self.new_base[row])
        self.new_tokens[row, at] = token_id
        self.last_token[row] = token_id
        self.num_tokens[row] += 1
        self.uncached[row] += 1
        if at + 1 == NEW_TOKENS_WIDTH:
            self.flush(row)

    def append_one_each(self, rows: RowIndices, token_ids: npt.NDArray[np.integer]) -> Int32Array:
        """One computed and one new token for each of distinct rows; returns their new lengths."""
        num_tokens = self.num_tokens[rows]
        at = num_tokens - self.new_base[rows]
        self.new_tokens.reshape(-1)[rows * NEW_TOKENS_WIDTH + at] = token_ids
        self.last_token[rows] = token_ids
        num_tokens += 1
        self.num_tokens[rows] = num_tokens
        for i in (at == NEW_TOKENS_WIDTH - 1).nonzero()[0].tolist():
            self.flush(int(rows[i]))
        return num_tokens

    def start_inflight(self, rows: RowIndices, num_tokens: Int32Array, *, is_only_step: bool) -> None:
        """A step of so many tokens of each row is launched; `is_only_step`: no other one is in flight."""
        if is_only_step:
            self.inflight[rows] = num_tokens
        else:
            self.inflight[rows] += num_tokens
        self.last_inflight[rows] = num_tokens

    def finish_inflight(self, rows: RowIndices, *, is_only_step: bool) -> None:
        """The older of the steps in flight is over; `is_only_step`: there was no newer one."""
        if is_only_step:
            self.inflight[rows] = 0
            self.last_inflight[rows] = 0
            return
        last = self.last_inflight[rows]
        left = np.where(self.inflight[rows] == last, np.int32(0), last)
        self.inflight[rows] = left
        self.last_inflight[rows] = left

    def flush(self, row: int) -> None:
        """Let the row's sequence store its newest tokens."""
        owner: Sequence = self.owners[row]
        base, num_tokens = int(self.new_base[row]), int(self.num_tokens[row])
        if owner.num_stored < num_tokens:
            owner.store_tokens(self.new_tokens[row, owner.num_stored - base : num_tokens - base])
        if num_tokens - base == NEW_TOKENS_WIDTH:
            self.new_base[row] = num_tokens

    def _double(self) -> None:
        old = self.capacity
        self._columns = np.pad(self._columns, ((0, 0), (0, old)))
        self.tables = np.pad(self.tables, ((0, old), (0, 0)))
        self.new_tokens = np.pad(self.new_tokens, ((0, old), (0, 0)))
        self.owners = np.concatenate([self.owners, np.full(old, None, object)])
        self._free.extend(range(2 * old - 1, old - 1, -1))
        self._name_columns()

    def _name_columns(self) -> None:
        for index, name in enumerate(COLUMNS):
            setattr(self, name, self._columns[index])

    def check_invariants(self) -> None:
        """Tables are 0 beyond their blocks, and token counts add up."""
        for row in self.taken().tolist():
            owner: Sequence = self.owners[row]
            assert owner.row == row
            num_blocks = self.num_blocks[row]
            assert (self.tables[row, :num_blocks] > 0).all(), f"a hole in the table of row {row}"
            assert not self.tables[row, num_blocks:].any(), f"row {row} lists blocks it does not hold"
            num_new = int(self.num_tokens[row] - self.new_base[row])
            assert 0 <= self.num_tokens[row] - owner.num_stored <= num_new < NEW_TOKENS_WIDTH
        for row in self._free:
            assert self.owners[row] is None
            assert not self.tables[row].any()
