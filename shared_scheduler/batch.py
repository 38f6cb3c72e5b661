"""The arrays a worker takes, built from rows; a decode step touches no sequence object."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shared_scheduler.cohort import Cohort
from shared_scheduler.errors import CorruptionError
from shared_scheduler.holdings import Holdings
from shared_scheduler.rows import Int32Array, RowIndices


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step as C-contiguous int32 arrays; N sequences, T = sum(seqlens_q) tokens, in sequence order.

    `token_ids`, `positions`, `slot_mapping` (block_id * block_size + offset, where the token's KV is
    written): [T]. `seqlens_q`, `seqlens_k` (k counts the tokens this step writes), `state_slots` (0: none):
    [N]. `block_tables`: [N, W], W as wide as the longest k needs, 0 beyond what a sequence holds. The arrays
    stay valid; steps with the same members share some, so do not write to them.

    `output_indices` [N]: index of the output token this step samples (noise = f(seed, index)).
    `input_from_previous` [N]: -1, or the row of the previous batch whose sampled token is this row's first
    input, because its result was not back when this batch was built (`token_ids` holds 0 there). If the
    previous step verified drafts, the lengths here assume that all were accepted: `resolve_inputs`.
    """

    is_prompt: bool
    block_size: int
    token_ids: Int32Array
    positions: Int32Array
    slot_mapping: Int32Array
    seqlens_q: Int32Array
    seqlens_k: Int32Array
    block_tables: Int32Array
    state_slots: Int32Array
    output_indices: Int32Array
    input_from_previous: Int32Array

    @property
    def num_sequences(self) -> int:
        return int(self.seqlens_q.size)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.size)

    @property
    def has_drafts(self) -> bool:
        """Are there drafts to verify behind some sequence's newest token?"""
        return not self.is_prompt and self.num_tokens > self.num_sequences

    @property
    def places(self) -> Int32Array:
        """[T]: how many tokens of the same sequence stand before each in this step."""
        first = np.cumsum(self.seqlens_q, dtype=np.int32) - self.seqlens_q
        return np.arange(self.num_tokens, dtype=np.int32) - np.repeat(first, self.seqlens_q)

    def resolve_inputs(
        self, sampled: npt.NDArray[np.integer], num_rejected: Int32Array | None = None
    ) -> "Batch":
        """The batch with its missing first tokens filled in from the previous step's results.

        `sampled[j]` and `num_rejected[j]` belong to row j of the previous batch; a rejected draft moves
        everything of the same sequence back by one position.
        """
        waits = self.input_from_previous >= 0
        source = self.input_from_previous[waits]
        first = (np.cumsum(self.seqlens_q) - self.seqlens_q)[waits]
        token_ids = self.token_ids.copy()
        token_ids[first] = sampled[source]
        resolved = replace(self, token_ids=token_ids, input_from_previous=np.full(waits.size, -1, np.int32))
        return resolved if num_rejected is None else resolved._moved_back(waits, num_rejected[source])

    def _moved_back(self, rows: npt.NDArray[np.bool_], by: Int32Array) -> "Batch":
        steps = np.zeros(rows.size, np.int32)
        steps[rows] = by
        owners = np.repeat(np.arange(rows.size), self.seqlens_q)
        positions = self.positions - steps[owners]
        blocks = self.block_tables[owners, positions // self.block_size]
        return replace(
            self,
            positions=positions,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            seqlens_k=self.seqlens_k - steps,
            output_indices=self.output_indices - steps,
        )


class BatchBuilder:
    """Builds batches; checks that every write lands in a block that nobody else holds."""

    def __init__(self, holdings: Holdings, block_size: int, max_model_len: int) -> None:
        self._rows = holdings.rows
        self._blocks = holdings.blocks
        self._states = holdings.states
        self._block_size = block_size
        self._positions = np.arange(max_model_len + 1, dtype=np.int32)
        self._offsets = np.arange(block_size, dtype=np.int32)

    def prompt(self, cohort: Cohort, seqlens_q: Int32Array) -> Batch:
        """Chunk i is the next seqlens_q[i] tokens of sequence i that are not cached."""
        sequences, rows = cohort.sequences, cohort.rows
        starts = self._rows.num_tokens[rows] - self._rows.uncached[rows]
        seqlens_k = starts + seqlens_q
        self._check_covered(rows, seqlens_k)
        self._check_own_state(cohort.state_slots)
        chunks = list(zip(rows.tolist(), starts.tolist(), seqlens_k.tolist(), strict=True))
        return Batch(
            is_prompt=True,
            block_size=self._block_size,
            token_ids=np.concatenate(
                [s.stored_tokens(start, end) for s, (_, start, end) in zip(sequences, chunks, strict=True)]
            ),
            positions=np.concatenate([self._positions[start:end] for _, start, end in chunks]),
            slot_mapping=self._chunk_slots(chunks),
            seqlens_q=seqlens_q,
            seqlens_k=seqlens_k,
            block_tables=self._gather_tables(rows, int(seqlens_k.max())),
            state_slots=cohort.state_slots,
            output_indices=self._rows.num_tokens[rows] - cohort.num_prompt_tokens,
            input_from_previous=cohort.minus_ones,
        )

    def decode(self, cohort: Cohort, reach: Int32Array, previous_rows: RowIndices | None) -> Batch:
        """One token of each member, the last of the `reach[i]` that it has with those in flight.

        Longest first. `previous_rows` are those of a step whose results are not back.
        """
        rows = cohort.rows
        token_ids = self._rows.last_token[rows]
        input_from_previous = cohort.minus_ones
        if previous_rows is not None:
            input_from_previous = self._rows_of_previous(rows, previous_rows)
            token_ids[input_from_previous >= 0] = 0
        self._check_own_state(cohort.state_slots)
        positions = reach - 1
        max_k = int(reach[0])
        return Batch(
            False,
            self._block_size,
            token_ids,
            positions,
            self._one_slot_each(rows, positions, max_k),
            cohort.ones,
            reach,
            self._gather_tables(rows, max_k),
            cohort.state_slots,
            reach - cohort.num_prompt_tokens,
            input_from_previous,
        )

    def verify(self, cohort: Cohort, reach: Int32Array, previous_rows: RowIndices | None) -> Batch:
        """Like `decode`, with each sequence's drafts behind its newest token."""
        rows = cohort.rows
        single = self.decode(cohort, reach, previous_rows)
        drafts = [sequence.draft.token_ids for sequence in cohort.sequences]
        seqlens_q = np.array([1 + len(ids) for ids in drafts], np.int32)
        first = np.cumsum(seqlens_q) - seqlens_q
        owner = np.repeat(np.arange(rows.size), seqlens_q)
        positions = single.positions[owner] + (np.arange(owner.size) - first[owner]).astype(np.int32)
        token_ids = np.empty(owner.size, np.int32)
        token_ids[first] = single.token_ids
        token_ids[np.flatnonzero(np.arange(owner.size) != first[owner])] = [i for ids in drafts for i in ids]
        seqlens_k = single.positions + seqlens_q
        max_k = int(seqlens_k.max())
        return replace(
            single,
            token_ids=token_ids,
            positions=positions,
            slot_mapping=self._one_slot_each(rows[owner], positions, max_k),
            seqlens_q=seqlens_q,
            seqlens_k=seqlens_k,
            block_tables=self._gather_tables(rows, max_k),
        )

    def _one_slot_each(self, rows: RowIndices, positions: Int32Array, max_k: int) -> Int32Array:
        tables, size = self._rows.tables, self._block_size
        width = tables.shape[1]
        if max_k > width * size:
            raise CorruptionError(f"a step writes position {max_k - 1}, beyond a table of {width} blocks")
        in_table = positions // size
        block_ids = tables.reshape(-1)[rows * width + in_table]
        if np.count_nonzero(block_ids) < block_ids.size:
            raise CorruptionError("a block table does not cover a write")
        self._check_own(block_ids)
        slots: Int32Array = (block_ids - in_table) * size + positions
        return slots

    def _chunk_slots(self, chunks: list[tuple[int, int, int]]) -> Int32Array:
        """Slots of positions start..end-1 of each (row, start, end), one after the other."""
        size, tables = self._block_size, self._rows.tables
        slots = np.empty(sum(end - start for _, start, end in chunks), np.int32)
        at = 0
        for row, start, end in chunks:
            block_ids = tables[row, start // size : -(-end // size)]
            self._check_own(block_ids)
            of_blocks = np.add.outer(block_ids * size, self._offsets).reshape(-1)
            skipped, length = start % size, end - start
            slots[at : at + length] = of_blocks[skipped : skipped + length]
            at += length
        return slots

    def _check_covered(self, rows: RowIndices, seqlens_k: Int32Array) -> None:
        short = (seqlens_k > self._rows.num_blocks[rows] * self._block_size).nonzero()[0]
        if short.size:
            row, length = int(rows[short[0]]), int(seqlens_k[short[0]])
            raise CorruptionError(
                f"row {row} writes position {length - 1} with {self._rows.num_blocks[row]} blocks"
            )

    def _check_own(self, block_ids: Int32Array) -> None:
        is_shared = self._blocks.num_shared and self._blocks.max_count(block_ids) > 1
        if is_shared or self._blocks.any_cached(block_ids):
            raise CorruptionError("a step writes a block that has another owner")

    def _check_own_state(self, slots: Int32Array) -> None:
        if self._states is not None and self._states.num_shared and self._states.max_count(slots) > 1:
            raise CorruptionError("a step writes a state slot that has another owner")

    def _gather_tables(self, rows: RowIndices, max_k: int) -> Int32Array:
        return self._rows.tables[rows, : -(-max_k // self._block_size)]

    def _rows_of_previous(self, rows: RowIndices, previous: RowIndices) -> Int32Array:
        """Each row's place in the previous batch if its result is not back, else -1."""
        place = np.full(self._rows.capacity, -1, np.int32)
        place[previous] = np.arange(previous.size, dtype=np.int32)
        found: Int32Array = np.where(self._rows.inflight[rows] > 0, place[rows], np.int32(-1))
        return found
