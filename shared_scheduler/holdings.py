"""Who holds what: blocks, state slot and row of every sequence, taken together or not at all.

Order of taking, everywhere: state pool, then block pool. A pool that two sequences share after a fork is
made private by whoever writes first; the copies that this needs on the device are collected here and
belong to the step being built. What such a copy reads stays taken until that step's results are in: a
transfer must not write into it before.
"""

from collections.abc import Iterable

import numpy as np

from shared_scheduler.block_manager import AllocStatus, BlockManager
from shared_scheduler.config import SchedulerConfig
from shared_scheduler.copies import NO_COPIES, Copies
from shared_scheduler.errors import CorruptionError
from shared_scheduler.info_slots import InfoSlots
from shared_scheduler.late_returns import LateReturns
from shared_scheduler.loans import Loans
from shared_scheduler.prefix_cache import NO_HIT, Hit
from shared_scheduler.reuse import Reuse
from shared_scheduler.rows import SequenceRows
from shared_scheduler.sequence import Sequence

INITIAL_TABLE_WIDTH = 16


class Holdings:
    """The pools and rows of one scheduler."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._block_size = config.block_size
        slots = config.num_state_slots
        self._step_id = 0
        self.states = None if slots is None else BlockManager(slots, "state slot")
        self.blocks = BlockManager(config.num_blocks)
        self.reuse = Reuse(config, self.blocks, self.states)
        self.loans = Loans(self.reuse.cache, self.blocks, config.block_size)
        self.info_slots = InfoSlots(config.num_draft_slots)
        self.rows = SequenceRows(
            min(config.max_num_seqs, 64), INITIAL_TABLE_WIDTH, config.max_blocks_per_sequence
        )
        self._copies = Copies()
        self.has_state_to_keep = False
        """A step must run, if only to copy a state before its slot is given up."""
        self._block_sources = LateReturns(self.blocks)
        self._state_sources = None if self.states is None else LateReturns(self.states)

    def start_step(self, step_id: int) -> None:
        """Copies collected from here on belong to this step."""
        self._step_id = step_id

    def finish_step(self, step_id: int) -> None:
        """The results of a step are in, so its copies are done, and those of all steps before it."""
        self._block_sources.finish_step(step_id)
        if self._state_sources is not None:
            self._state_sources.finish_step(step_id)

    def can_hold(self, num_blocks: int, num_slots: int = 1) -> AllocStatus:
        """Blocks and slot together: enough blocks without a free slot is LATER."""
        status = self.blocks.can_allocate(num_blocks)
        if status is AllocStatus.OK and self.states is not None:
            return self.states.can_allocate(num_slots)
        return status

    def can_hold_behind(self, hit: Hit, num_blocks: int) -> AllocStatus:
        """`can_hold` for `num_blocks` of which the first are found cached."""
        if hit is NO_HIT:
            return self.can_hold(num_blocks)
        num_taken = self.blocks.num_unused(hit.block_ids)
        return self.can_hold(num_blocks - hit.num_blocks + num_taken, self.reuse.num_slots_for(hit))

    def attach(
        self, sequence: Sequence, num_blocks: int, hit: Hit = NO_HIT, *, zero_state: bool = True
    ) -> None:
        """Give a sequence without blocks a row, a slot and `num_blocks` blocks, those of `hit` first."""
        if sequence.holds_blocks:
            raise CorruptionError(f"{sequence.request_id!r} already holds blocks")
        slot = 0 if self.states is None else self._take_slot(hit.state_slot)
        if slot and zero_state and not hit.state_slot:
            self._copies.zero_states.append(slot)
        self._bind(sequence, slot)
        self.reuse.use(sequence, hit)
        if hit is not NO_HIT:
            self.rows.append_blocks(sequence.row, hit.block_ids)
        self.rows.append_blocks(sequence.row, self.blocks.allocate(num_blocks - hit.num_blocks))

    def store(self, sequence: Sequence) -> None:
        """Let others find what is computed of a sequence; nothing reads or writes its blocks just now.

        Where the cache has the same blocks already, the sequence uses those from here on.
        """
        if self.reuse.cache is None or sequence.is_in_flight:
            return
        table = sequence.cache.block_table
        stored = self.reuse.store(sequence, table, may_swap=True)
        replaced = table[table != stored]
        if replaced.size:
            self.rows.tables[sequence.row, : stored.size] = stored
            self._block_sources.free(replaced)
        kept = self.reuse.keep_state(sequence)
        if kept is not None:
            state = sequence.cache.state_id
            assert state is not None
            assert self._state_sources is not None
            self._copies.clone_states.append((state, kept))
            self._state_sources.add(state, self._step_id + 1)
            self.has_state_to_keep = True

    def _take_slot(self, kept_state: int) -> int:
        """A slot for a sequence; into which a kept state is copied, if one is given."""
        assert self.states is not None
        assert self._state_sources is not None
        if not kept_state:
            return self.states.allocate_one()
        self.states.pin([kept_state])
        slot = self.states.allocate_one()
        self._copies.clone_states.append((kept_state, slot))
        self._state_sources.add(kept_state, self._step_id)
        self._state_sources.free(np.array([kept_state], np.int32))
        return slot

    def share(self, parent: Sequence, child: Sequence, num_cached: int) -> None:
        """Pin the parent's slot and the blocks of its first `num_cached` tokens for the child."""
        slot = parent.cache.state_id or 0
        table = parent.cache.block_table[: -(-num_cached // self._block_size)]
        if slot and self.states is not None:
            self.states.pin([slot])
        self.blocks.pin(table)
        self._bind(child, slot)
        self.rows.append_blocks(child.row, table)
        child.cache.set_num_tokens(num_cached)
        child.cache.swa_valid_start = parent.cache.swa_valid_start

    def release(self, sequence: Sequence) -> int:
        """Everything the sequence holds goes back; nothing may read or write it any more.

        What is computed of it can be found in the cache. Returns how many blocks come back only when the
        copies that read them are done.
        """
        if not sequence.holds_blocks:
            return 0
        row, slot = sequence.row, sequence.cache.state_id
        table = sequence.cache.block_table
        if not self._block_sources.is_read(table):
            # A block that stays taken for a copy needs those before it taken, too; the cache may have others.
            self.reuse.store(sequence, table, may_swap=False)
        self.info_slots.give_back(sequence)
        sequence.unbind_row()
        self.rows.give_back(row)
        if slot is not None and self._state_sources is not None:
            self._state_sources.free(np.array([slot], np.int32))
        return self._block_sources.free(table)

    def num_missing(self, sequence: Sequence) -> int:
        """Blocks to take before the next step may write: growth, and a private copy of a shared tail."""
        if not sequence.holds_blocks:
            return sequence.num_blocks_needed()
        held = int(self.rows.num_blocks[sequence.row])
        return sequence.num_blocks_needed() - held + (self._shared_tail(sequence) is not None)

    def num_missing_slots(self, sequence: Sequence) -> int:
        if self.states is None:
            return 0
        slot = sequence.cache.state_id
        return int(slot is None or self.states.count(slot) > 1)

    def is_shared(self, sequence: Sequence) -> bool:
        """Must something be copied before this sequence may write?"""
        return self._shared_tail(sequence) is not None or self.num_missing_slots(sequence) > 0

    def make_writable(self, sequence: Sequence) -> None:
        """Fit the table exactly to the need and own alone what the next step writes; ask first."""
        self._own_state(sequence)
        self._own_tail(sequence)
        row = sequence.row
        needed, held = sequence.num_blocks_needed(), int(self.rows.num_blocks[row])
        if needed > held:
            self.rows.append_blocks(row, self.blocks.allocate(needed - held))
        elif needed < held:
            self.blocks.free(self.rows.cut_blocks(row, needed))

    def give_back_unused_pin(self, sequence: Sequence) -> None:
        """A fork that ends before it was admitted: its pins go back, nothing is copied (dst 0)."""
        if not (sequence.is_unadmitted_fork and sequence.holds_blocks):
            return
        tail = self._shared_tail(sequence)
        if tail is not None:
            self._copies.clone_blocks.append((int(self.rows.tables[sequence.row, tail]), 0))
        slot = sequence.cache.state_id
        if slot is not None and self.states is not None and self.states.count(slot) > 1:
            self._copies.clone_states.append((slot, 0))

    def take_copies(self) -> Copies:
        """The copies collected since the last call; they go with the step being built."""
        copies = self._copies
        if not (copies.zero_states or copies.clone_blocks or copies.clone_states):
            return NO_COPIES
        self._copies = Copies()
        self.has_state_to_keep = False
        return copies

    def check_invariants(self, holders: Iterable[Sequence]) -> None:
        """Every count in both pools is the number of those who use the piece: sequences, copies, loans."""
        others = np.concatenate([self._block_sources.late(), self.loans.pinned()])
        owners = np.bincount(others, minlength=self.blocks.num_usable + 1)
        slots = None
        if self.states is not None and self._state_sources is not None:
            slots = np.bincount(self._state_sources.late(), minlength=self.states.num_usable + 1)
        num_rows = 0
        holders = list(holders)
        for sequence in holders:
            assert self.rows.owners[sequence.row] is sequence
            num_rows += 1
            table = sequence.cache.block_table
            assert np.unique(table).size == table.size, f"a block twice in the table of {sequence!r}"
            owners[table] += 1
            if slots is not None:
                slots[sequence.cache.state_id or 0] += 1
        assert num_rows == self.rows.num_taken, f"{self.rows.num_taken - num_rows} rows without a live owner"
        self.blocks.check_invariants()
        if self.reuse.cache is not None:
            self.reuse.cache.check_invariants()
        assert np.array_equal(owners, self.blocks.counts()), "block owners and counts differ"
        if self.states is not None and slots is not None:
            self.states.check_invariants()
            assert np.array_equal(slots, self.states.counts()), "slot owners and counts differ"
        self.rows.check_invariants()
        self.info_slots.check_invariants(holders)

    def _bind(self, sequence: Sequence, slot: int) -> None:
        row = self.rows.take(sequence)
        limit = self._config.max_model_len + 1
        end_length = min(sequence.num_prompt_tokens + sequence.sampling.max_tokens, limit)
        sequence.bind_row(self.rows, row, end_length)
        self.rows.state_slot[row] = slot

    def _shared_tail(self, sequence: Sequence) -> int | None:
        """Index in the table of the block to be written next, if somebody else has it too."""
        if not (self.blocks.num_shared or self.blocks.num_cached):
            return None
        written = sequence.cache.num_tokens + sequence.schedule.total_inflight_tokens
        index = written // self._block_size
        if index >= self.rows.num_blocks[sequence.row]:
            return None
        return None if self.blocks.is_private(int(self.rows.tables[sequence.row, index])) else index

    def _own_state(self, sequence: Sequence) -> None:
        if self.states is None or not self.num_missing_slots(sequence):
            return
        shared = sequence.cache.state_id
        assert shared is not None
        slot = self.states.allocate_one()
        self._copies.clone_states.append((shared, slot))
        assert self._state_sources is not None
        self._state_sources.add(shared, self._step_id)
        self.rows.state_slot[sequence.row] = slot
        self.states.free([shared])

    def _own_tail(self, sequence: Sequence) -> None:
        tail = self._shared_tail(sequence)
        if tail is None:
            return
        shared, own = int(self.rows.tables[sequence.row, tail]), self.blocks.allocate_one()
        self._copies.clone_blocks.append((shared, own))
        self._block_sources.add(shared, self._step_id)
        table = self.rows.tables[sequence.row, : tail + 1].copy()
        self.rows.tables[sequence.row, tail] = own
        if self.blocks.count(shared) > 1:
            self.blocks.free([shared])
        else:
            self.blocks.pin(table[:tail])  # the cache's alone, and it must stay until it is copied
            self._block_sources.free(table)
