"""Who goes into a decode step, who gets blocks, and who is preempted for them."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shared_scheduler.block_manager import AllocStatus
from shared_scheduler.config import SchedulerConfig
from shared_scheduler.drafts import InfoSlots
from shared_scheduler.holdings import Holdings
from shared_scheduler.prefill import FORK_MARK
from shared_scheduler.queues import Queues
from shared_scheduler.rows import Int32Array, RowIndices
from shared_scheduler.sequence import Sequence
from shared_scheduler.status import SequenceStatus

NO_ROWS: RowIndices = np.empty(0, np.intp)

DescendingOrder = Callable[[npt.NDArray[np.int32]], npt.NDArray[np.intp]]
"""Indices that put keys in descending order. The reference's `std::sort` leaves the order of equals open."""


def stable_descending(keys: npt.NDArray[np.int32]) -> npt.NDArray[np.intp]:
    return np.argsort(-keys, kind="stable")


@dataclass(slots=True)
class DecodePlan:
    """Rows of one decode step, longest sequence first, and those that ended on the way."""

    rows: RowIndices = field(default_factory=lambda: NO_ROWS)
    num_drafts: Int32Array | None = None
    """Drafts to verify per row; None: no row has any."""
    finished: list[Sequence] = field(default_factory=list)
    ignored: list[Sequence] = field(default_factory=list)


class DecodePlanner:
    """Last come, first served: blocks go to the sequences with the shortest output first.

    When they run out, the sequence with the longest output is preempted.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        queues: Queues,
        holdings: Holdings,
        info_slots: InfoSlots,
        order: DescendingOrder = stable_descending,
    ) -> None:
        self._config = config
        self._queues = queues
        self._holdings = holdings
        self._info_slots = info_slots
        self._order = order
        self._like_reference = not config.preempt_only_on_need

    def plan(self, is_overlapped: bool) -> DecodePlan:
        """`is_overlapped`: the results of an earlier step are not back yet."""
        plan = DecodePlan()
        swept = self._sweep(plan)
        if not self._like_reference:
            self._end(swept, plan)
        self._fill(plan, is_overlapped)
        if self._like_reference:
            # Its engine takes finished sequences apart only after the step has been decided.
            self._end(swept, plan)
        return plan

    def _fill(self, plan: DecodePlan, is_overlapped: bool) -> None:
        self._admit_prompted(plan, is_overlapped)
        queues, rows = self._queues, self._holdings.rows
        if not queues.num_running:
            return
        if not (queues.running_is_ordered or self._like_reference):
            self._put_in_order()
        candidates = queues.running
        if is_overlapped:
            may_continue = self._may_continue(candidates)
            candidates = candidates if may_continue.all() else candidates[may_continue]
        if not candidates.size:
            return
        reach = rows.num_tokens[candidates] + rows.inflight[candidates] if is_overlapped else rows.num_tokens[candidates]
        if self._grow_all(candidates, reach):
            plan.rows = candidates
        else:
            self._fill_from_shortest(plan, candidates)

    def can_admit_prompted(self) -> bool:
        """Would a decode step move, or end, the head of `prompted` now?"""
        if not self._queues.prompted:
            return False
        head = self._queues.prompted[0]
        return head.is_finished or (self._has_place() and self._can_make_writable(head))

    # ----- who is there

    def _sweep(self, plan: DecodePlan) -> list[Sequence]:
        """Take the ended out of the queues; returns those that were running."""
        queues = self._queues
        if not (queues.has_marked or self._like_reference):
            return []
        queues.has_marked = False
        plan.finished += queues.sweep_prompted()
        plan.ignored += queues.sweep_waiting()
        return queues.sweep_running()

    def _end(self, swept: list[Sequence], plan: DecodePlan) -> None:
        plan.finished += [sequence for sequence in swept if self._queues.end_queued(sequence)]
        for sequence in swept:
            self._info_slots.give_back(sequence)

    def _has_place(self) -> bool:
        return self._queues.num_running + self._queues.num_joining < self._config.max_num_seqs

    def _can_make_writable(self, sequence: Sequence) -> bool:
        if not sequence.schedule.branch_id.startswith(FORK_MARK):
            return True
        holdings = self._holdings
        missing = max(holdings.num_missing(sequence), 0)
        return holdings.can_hold(missing, holdings.num_missing_slots(sequence)) is AllocStatus.OK

    def _admit_prompted(self, plan: DecodePlan, is_overlapped: bool) -> None:
        queues = self._queues
        admitted = []
        while queues.prompted and self._has_place():
            sequence = queues.prompted[0]
            if not self._can_make_writable(sequence):
                if not admitted and not is_overlapped and not self._can_others_progress():
                    # Only pins of forks fill the pool: the first one gives way, or nothing would ever move.
                    queues.prompted.popleft()
                    self._preempt(sequence, plan)
                    continue
                break
            queues.prompted.popleft()
            if sequence.schedule.branch_id.startswith(FORK_MARK):
                sequence.schedule.branch_id = sequence.schedule.branch_id.removeprefix(FORK_MARK)
                self._holdings.make_writable(sequence)
            sequence.schedule.status = SequenceStatus.RUNNING
            self._info_slots.take(sequence)
            admitted.append(sequence)
            queues.join_running([sequence])

    def _can_others_progress(self) -> bool:
        queues = self._queues
        return bool(queues.num_running or queues.num_joining) or any(s.holds_blocks for s in queues.waiting)

    def _put_in_order(self) -> None:
        rows, running = self._holdings.rows, self._queues.running
        self._queues.running = running[stable_descending(rows.num_tokens[running] + rows.inflight[running])]
        self._queues.running_is_ordered = True

    def _may_continue(self, candidates: RowIndices) -> npt.NDArray[np.bool_]:
        """False for rows that the results in flight are certain to end by length."""
        rows = self._holdings.rows
        is_in_flight = rows.inflight[candidates] > 0
        mask: npt.NDArray[np.bool_] = rows.num_tokens[candidates] + is_in_flight < rows.end_length[candidates]
        return mask

    # ----- blocks

    def _grow_all(self, candidates: RowIndices, reach: Int32Array) -> bool:
        """The usual step: nobody needs more than one block, and all of them are free. False: nothing done."""
        if self._like_reference or self._queues.has_drafts:
            return False
        rows, blocks = self._holdings.rows, self._holdings.blocks
        room = rows.num_blocks[candidates] * self._config.block_size
        must_grow = reach > room
        num_new = int(np.count_nonzero(must_grow))
        if num_new > blocks.num_free or (blocks.num_shared and self._writes_shared(candidates, reach)):
            return False
        if num_new:
            growing = candidates[must_grow]
            at = rows.num_blocks[growing]
            rows.ensure_width(int(at.max()) + 1)
            rows.tables[growing, at] = blocks.allocate(num_new)
            rows.num_blocks[growing] = at + 1
        return True

    def _writes_shared(self, candidates: RowIndices, reach: Int32Array) -> bool:
        rows, blocks = self._holdings.rows, self._holdings.blocks
        at = np.minimum((reach - 1) // self._config.block_size, rows.num_blocks[candidates] - 1)
        return blocks.max_count(rows.tables[candidates, at]) > 1

    def _fill_from_shortest(self, plan: DecodePlan, candidates: RowIndices) -> None:
        rows, queues = self._holdings.rows, self._queues
        outputs = rows.num_tokens[candidates] - rows.num_prompt_tokens[candidates]
        by_output = candidates[self._order(outputs)]
        sequences: list[Sequence] = rows.owners[by_output].tolist()
        scheduled: list[Sequence] = []
        preempted: list[int] = []
        coming = 0
        first, last = 0, len(sequences)
        while first < last:
            sequence = sequences[last - 1]
            last -= 1
            needed = self._blocks_wanted(sequence)
            while not self._is_available(needed, coming) and first < last:
                victim = sequences[first]
                first += 1
                preempted.append(victim.row)
                coming += self._preempt(victim, plan)
            if self._is_available(needed):
                self._holdings.make_writable(sequence)
                scheduled.append(sequence)
            elif not self._is_available(needed, coming):
                preempted.append(sequence.row)
                coming += self._preempt(sequence, plan)
        lengths = np.array([s.num_tokens + s.schedule.total_inflight_tokens for s in scheduled], np.int32)
        order = self._order(lengths)
        scheduled_rows = np.array([s.row for s in scheduled], np.intp)
        plan.rows = scheduled_rows[order]
        if self._queues.has_drafts:
            plan.num_drafts = np.array([len(scheduled[i].draft.token_ids) for i in order.tolist()], np.int32)
        # Those that only sit this step out stay in `running`.
        left = queues.running[~np.isin(queues.running, np.concatenate([plan.rows, np.array(preempted, np.intp)]))]
        queues.running = np.concatenate([plan.rows, left])
        queues.running_is_ordered = left.size == 0 and plan.num_drafts is None

    def _blocks_wanted(self, sequence: Sequence) -> int:
        """Free blocks that must be there for this sequence to go on. Drafts are dropped before anyone is hurt."""
        missing = self._holdings.num_missing(sequence)
        if missing > self._holdings.blocks.num_free and sequence.draft.token_ids:
            sequence.draft.clear()
            missing = self._holdings.num_missing(sequence)
        return max(missing, 1) if self._like_reference else max(missing, 0)

    def _is_available(self, num_blocks: int, num_coming: int = 0) -> bool:
        return num_blocks <= self._holdings.blocks.num_free + num_coming

    def _preempt(self, sequence: Sequence, plan: DecodePlan) -> int:
        """End it or put it back to be computed again. Returns the blocks that come back only with results."""
        queues = self._queues
        self._info_slots.give_back(sequence)
        if self._config.stop_preempted_request or sequence.structured.started:
            sequence.finish(SequenceStatus.FINISHED_PREEMPTED)
            if queues.report(sequence):
                plan.ignored.append(sequence)
        else:
            sequence.schedule.status = SequenceStatus.WAITING
            queues.waiting.appendleft(sequence)
        if sequence.is_in_flight:
            queues.disturb()
            return int(np.count_nonzero(self._holdings.blocks.counts()[sequence.cache.block_table] == 1))
        self._holdings.release(sequence)
        if not sequence.is_finished:
            sequence.reset_for_recompute()
        return 0
