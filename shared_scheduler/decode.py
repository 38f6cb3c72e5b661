"""Who goes into a decode step, who gets blocks, and who is preempted for them."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shared_scheduler.admission import AdmissionEstimate
from shared_scheduler.block_manager import AllocStatus
from shared_scheduler.config import SchedulerConfig
from shared_scheduler.drafts import DraftChooser
from shared_scheduler.holdings import Holdings
from shared_scheduler.prefill import PromptPlanner
from shared_scheduler.queues import Queues
from shared_scheduler.retraction import Retraction
from shared_scheduler.rows import Int32Array, RowIndices
from shared_scheduler.sequence import FORK_MARK, Sequence
from shared_scheduler.status import SequenceStatus

NO_ROWS: RowIndices = np.empty(0, np.intp)
NO_LENGTHS: Int32Array = np.empty(0, np.int32)

DescendingOrder = Callable[[npt.NDArray[np.int32]], npt.NDArray[np.intp]]
"""Indices that put keys in descending order. The reference's `std::sort` leaves the order of equals open."""


def stable_descending(keys: npt.NDArray[np.int32]) -> npt.NDArray[np.intp]:
    return np.argsort(-keys, kind="stable")


@dataclass(slots=True)
class DecodePlan:
    """Rows of one decode step, longest sequence first, and those that ended on the way."""

    rows: RowIndices = field(default_factory=lambda: NO_ROWS)
    reach: Int32Array = field(default_factory=lambda: NO_LENGTHS)
    """Tokens of each row, those in flight included, drafts not."""
    has_drafts: bool = False
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
        prompts: PromptPlanner,
        drafts: DraftChooser,
        admission: AdmissionEstimate,
        order: DescendingOrder = stable_descending,
    ) -> None:
        self._config = config
        self._queues = queues
        self._holdings = holdings
        self._prompts = prompts
        self._drafts = drafts
        self._admission = admission
        self._order = order
        self._retraction = Retraction(config, queues, holdings)
        self._like_reference = not config.preempt_only_on_need

    def plan(self, is_overlapped: bool) -> DecodePlan:
        """`is_overlapped`: the results of an earlier step are not back yet."""
        plan = DecodePlan()
        if not self._like_reference:
            self._fill(plan, is_overlapped)
            if self._admission.is_on and plan.rows.size:
                self._admission.ratio.decode_step()
            return plan
        # The reference keeps what has finished in `running` until here, and its engine takes it apart only
        # after the step has been decided.
        swept = self._queues.sweep_running()
        self._fill(plan, is_overlapped)
        for sequence in swept:
            if self._queues.end_queued(sequence):
                plan.finished.append(sequence)
        return plan

    def _fill(self, plan: DecodePlan, is_overlapped: bool) -> None:
        queues = self._queues
        while True:
            self._admit_prompted()
            self._fill_from_running(plan, is_overlapped)
            if plan.rows.size or is_overlapped or not queues.prompted or self._can_prompts_progress():
                return
            # Only pins of forks fill the pools: the youngest gives way, or nothing would ever move.
            self._preempt(queues.prompted.pop(), plan)

    def _fill_from_running(self, plan: DecodePlan, is_overlapped: bool) -> None:
        queues, rows = self._queues, self._holdings.rows
        if not (queues.running_is_ordered or self._like_reference):
            self._put_in_order()
        candidates = queues.running
        if is_overlapped and candidates.size:
            may_continue = self._may_continue(candidates)
            candidates = candidates if may_continue.all() else candidates[may_continue]
        if not candidates.size:
            return
        if queues.has_drafts:
            self._drafts.trim(rows.owners[candidates].tolist())
        reach = rows.num_tokens[candidates]
        if is_overlapped:
            reach += rows.inflight[candidates]
        must_retract = self._retraction.is_due()
        if not must_retract and self._grow_all(candidates, reach):
            plan.rows, plan.reach = candidates, reach
        else:
            self._fill_from_shortest(plan, candidates, must_retract)

    # ----- who is there

    def _has_place(self) -> bool:
        return self._queues.num_running + self._queues.num_joining < self._config.max_num_seqs

    def _can_make_writable(self, sequence: Sequence) -> bool:
        if not sequence.is_unadmitted_fork:
            return True
        holdings = self._holdings
        missing = max(holdings.num_missing(sequence), 0) + self._num_wanted_by_running()
        return holdings.can_hold(missing, holdings.num_missing_slots(sequence)) is AllocStatus.OK

    def _num_wanted_by_running(self) -> int:
        """Blocks that those who run already need for their next token: a fork must not take these.

        Else it would end, or throw back, a sequence that is being served, its own parent for one.
        """
        rows, running = self._holdings.rows, self._queues.running
        if self._like_reference or not running.size:
            return 0
        reach = rows.num_tokens[running] + rows.inflight[running]
        wants = reach > rows.num_blocks[running] * self._config.block_size
        return int(np.count_nonzero(wants | self._writes_shared_block(running, reach)))

    def _admit_prompted(self) -> None:
        queues = self._queues
        if not queues.prompted or self._must_wait_for_ends():
            return
        while queues.prompted and self._has_place() and self._can_make_writable(queues.prompted[0]):
            sequence = queues.prompted.popleft()
            if sequence.is_unadmitted_fork:
                sequence.schedule.branch_id = sequence.schedule.branch_id.removeprefix(FORK_MARK)
                self._holdings.make_writable(sequence)
            sequence.schedule.status = SequenceStatus.RUNNING
            self._holdings.info_slots.take(sequence)
            queues.join_running([sequence])

    def _must_wait_for_ends(self) -> bool:
        """Is the pool expected to overflow even with those who hold blocks already?"""
        return self._admission.is_on and bool(self._queues.num_running) and not self._admission.fits_all()

    def _can_prompts_progress(self) -> bool:
        """Is a prompt step in flight, or could the next one take somebody?"""
        return bool(self._queues.num_joining) or self._prompts.has_admissible_head()

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
        must_grow = (reach > rows.num_blocks[candidates] * self._config.block_size).nonzero()[0]
        if must_grow.size > blocks.num_free or self._writes_shared(candidates, reach):
            return False
        if must_grow.size:
            rows.append_block_each(candidates[must_grow], blocks.allocate(must_grow.size))
        return True

    def _writes_shared(self, candidates: RowIndices, reach: Int32Array) -> bool:
        """Must some row get a private copy of its tail block or of its state first?"""
        rows, blocks, states = self._holdings.rows, self._holdings.blocks, self._holdings.states
        if states is not None and states.num_shared and states.max_count(rows.state_slot[candidates]) > 1:
            return True
        return blocks.num_shared > 0 and bool(self._writes_shared_block(candidates, reach).any())

    def _writes_shared_block(self, candidates: RowIndices, reach: Int32Array) -> npt.NDArray[np.bool_]:
        rows, blocks = self._holdings.rows, self._holdings.blocks
        at = np.minimum((reach - 1) // self._config.block_size, rows.num_blocks[candidates] - 1)
        return blocks.has_other_owners(rows.tables[candidates, at])

    def _fill_from_shortest(self, plan: DecodePlan, candidates: RowIndices, must_retract: bool) -> None:
        """The step in which somebody may have to give way, or has drafts, or shares what it writes."""
        queues = self._queues
        num_before = queues.num_running
        scheduled, sit_out = self._choose(plan, candidates, must_retract)
        reach = np.array([s.num_tokens + s.schedule.total_inflight_tokens for s in scheduled], np.int32)
        rows = np.array([s.row for s in scheduled], np.intp)
        order = self._order(reach)
        plan.rows, plan.reach = rows[order], reach[order]
        # A step after one with drafts comes here too: rejected drafts leave blocks to give back.
        queues.has_drafts = plan.has_drafts = any(s.draft.token_ids for s in scheduled)
        certain_to_end = queues.running[~np.isin(queues.running, candidates)]
        queues.running = np.concatenate([plan.rows, np.array(sit_out, np.intp), certain_to_end])
        queues.running_is_ordered = plan.rows.size == num_before and not plan.has_drafts

    def _victims_first(self, candidates: RowIndices) -> list[Sequence]:
        """Longest output first; with `retract_cheapest` the cheapest to lose."""
        rows = self._holdings.rows
        outputs = rows.num_tokens[candidates] - rows.num_prompt_tokens[candidates]
        sequences: list[Sequence] = rows.owners[candidates[self._order(outputs)]].tolist()
        return self._retraction.cheapest_first(sequences) if self._retraction.is_on else sequences

    def _choose(
        self, plan: DecodePlan, candidates: RowIndices, must_retract: bool
    ) -> tuple[list[Sequence], list[int]]:
        """Those that run, last victim first, with their blocks; and rows that miss this step only."""
        sequences = self._victims_first(candidates)
        scheduled: list[Sequence] = []
        sit_out: list[int] = []
        first, last = 0, len(sequences)
        coming = 0
        if must_retract and last > 1 and not sequences[0].structured.started:
            coming += self._preempt(sequences[0], plan)
            first = 1
        while first < last:
            last -= 1
            sequence = sequences[last]
            wanted = self._blocks_wanted(sequence)
            while not self._is_available(wanted, coming) and first < last:
                coming += self._preempt(sequences[first], plan)
                first += 1
            is_alone = not (scheduled or sit_out)
            has_way = self._is_available(wanted, coming) or (
                is_alone and self._clear_way(wanted, plan, len(sequences))
            )
            if not has_way:
                coming += self._preempt(sequence, plan, is_alone=is_alone)
            elif self._is_available(wanted) and self._has_slot_for(sequence):
                self._holdings.make_writable(sequence)
                scheduled.append(sequence)
            else:
                sit_out.append(sequence.row)
        if self._admission.is_on and len(scheduled) + len(sit_out) < len(sequences):
            self._admission.retracted(sequences)
        return scheduled, sit_out

    def _clear_way(self, num_blocks: int, plan: DecodePlan, num_candidates: int) -> bool:
        """Can the last running sequence go on, now or later, once nobody else holds blocks?"""
        if not self._retraction.is_on:
            return False
        is_clear = self._retraction.clear_way(
            lambda num_coming: self._is_available(num_blocks, num_coming),
            lambda fork: self._preempt(fork, plan),
        )
        # Whoever is in a launched step gives blocks back with its results, or will be a victim.
        return is_clear or self._queues.num_joining > 0 or self._queues.num_running > num_candidates

    def _blocks_wanted(self, sequence: Sequence) -> int:
        """Free blocks this sequence needs to go on. Its drafts are dropped before anyone is hurt."""
        missing = self._holdings.num_missing(sequence)
        if missing > self._holdings.blocks.num_free and sequence.draft.token_ids:
            sequence.draft.clear()
            missing = self._holdings.num_missing(sequence)
        return max(missing, 1) if self._like_reference else max(missing, 0)

    def _is_available(self, num_blocks: int, num_coming: int = 0) -> bool:
        return num_blocks <= self._holdings.blocks.num_free + num_coming

    def _has_slot_for(self, sequence: Sequence) -> bool:
        """False: its state is shared with a fork and there is no slot for a copy; it sits this step out."""
        states = self._holdings.states
        return states is None or self._holdings.num_missing_slots(sequence) <= states.num_free

    def _preempt(self, sequence: Sequence, plan: DecodePlan, *, is_alone: bool = False) -> int:
        """End it or put it back to be computed again. Returns the blocks that come back only with results.

        `is_alone`: the pool is too small for it even so.
        """
        queues = self._queues
        is_hopeless = is_alone and self._retraction.is_on
        self._holdings.give_back_unused_pin(sequence)
        if self._config.stop_preempted_request or sequence.structured.started or is_hopeless:
            sequence.finish(SequenceStatus.FINISHED_PREEMPTED)
            if queues.report(sequence):
                plan.ignored.append(sequence)
        else:
            sequence.schedule.status = SequenceStatus.WAITING
            queues.waiting.appendleft(sequence)
        if sequence.is_in_flight:
            queues.disturb()
            return self._holdings.blocks.num_sole(sequence.cache.block_table)
        num_late = self._holdings.release(sequence)
        if not sequence.is_finished:
            sequence.reset_for_recompute()
        return num_late
