"""Who goes into a prompt step, and how much of each prompt."""

import sys
from dataclasses import dataclass, field

from shared_scheduler.admission import AdmissionEstimate
from shared_scheduler.block_manager import AllocStatus
from shared_scheduler.budgets import AdmissionResult, StepBudgets
from shared_scheduler.chunking import CutRules, chunk_length
from shared_scheduler.config import EngineType, SchedulerConfig
from shared_scheduler.holdings import Holdings
from shared_scheduler.prefix_cache import NO_HIT, Hit
from shared_scheduler.queues import Queues
from shared_scheduler.sequence import FORK_MARK, Sequence
from shared_scheduler.status import SequenceStatus

UNBOUNDED = sys.maxsize


@dataclass(slots=True)
class PromptPlan:
    """Sequences of one prompt step with their chunk lengths, and those that ended on the way."""

    sequences: list[Sequence] = field(default_factory=list)
    seqlens_q: list[int] = field(default_factory=list)
    ignored: list[Sequence] = field(default_factory=list)
    num_last_chunks: int = 0
    num_cached_tokens: int = 0
    result: AdmissionResult = AdmissionResult.CONTINUE
    """Why the next waiting prompt was not taken; CONTINUE: for no want of room."""

    @property
    def is_empty(self) -> bool:
        return not self.sequences and not self.ignored


class PromptPlanner:
    """Fills a prompt step from the head of `waiting`; a limit that the head does not pass ends the step."""

    def __init__(
        self, config: SchedulerConfig, queues: Queues, holdings: Holdings, admission: AdmissionEstimate
    ) -> None:
        self._config = config
        self._admission = admission
        self._queues = queues
        self._holdings = holdings
        self._num_usable = holdings.blocks.num_usable
        self._longest = min(config.prompt_limit, config.prefill_max_sum_seqlen_k or UNBOUNDED)
        self._rules = CutRules(
            alignment=config.cut_alignment,
            min_chunk=config.min_chunk,
            may_cut=config.chunked_prefill,
            image_pad=config.image_pad_token_id,
            image_start=config.image_start_token_id,
        )

    def plan(self) -> PromptPlan:
        plan, budgets = PromptPlan(), self._empty_step()
        waiting = self._queues.waiting
        while (head := waiting.head()) is not None:
            if head.is_finished:
                self._drop_head(plan)
                continue
            if not head.schedule.schedulable:
                break
            status = self._can_hold(head)
            if status is AllocStatus.LATER and self._make_way(head):
                continue
            length = self._length_now(head, status, budgets, plan)
            if length is None:
                head.finish(SequenceStatus.FINISHED_IGNORED)
                self._drop_head(plan)
                continue
            if length == 0:
                break
            budgets.take(length, head.num_tokens, is_scored=head.needs_whole_prompt)
            is_last = self._take_head(plan, length)
            if not is_last and self._config.engine_type is EngineType.NORMAL:
                break
        if plan.sequences:
            waiting.end_step()
        return plan

    def has_admissible_head(self) -> bool:
        """Would a prompt step take, or end, a waiting sequence now?"""
        head = self._queues.waiting.head()
        if head is None:
            return False
        if head.is_finished:
            return True
        if not head.schedule.schedulable:
            return False
        return self._can_hold(head) is not AllocStatus.LATER or self._way_for(head) is not None

    # ----- limits

    def _empty_step(self) -> StepBudgets:
        config = self._config
        taken = self._queues.num_running + self._queues.num_joining
        sum_k = config.prefill_max_sum_seqlen_k
        return StepBudgets(
            num_sequences=config.max_num_seqs - taken,
            num_tokens=config.max_num_batched_tokens,
            num_scored=config.max_scored_tokens or UNBOUNDED,
            max_chunk=config.max_chunk_tokens or UNBOUNDED,
            sum_seqlen_k=UNBOUNDED if sum_k is None else sum_k,
            alignment=config.cut_alignment,
        )

    def _length_now(
        self, head: Sequence, status: AllocStatus, budgets: StepBudgets, plan: PromptPlan
    ) -> int | None:
        """Tokens of the head's next chunk; 0: it must wait; None: it can never run.

        NEVER comes before the cap on sequences, as the recordings show: a hopeless head holds nobody up.
        """
        if status is AllocStatus.NEVER:
            return None
        plan.result = budgets.check(status, head.num_tokens)
        if plan.result is not AdmissionResult.CONTINUE:
            return 0
        room = budgets.chunk_room(is_scored=head.needs_whole_prompt)
        length = self._chunk_length(head, room)
        may_exceed = budgets.is_untouched or not head.needs_whole_prompt
        if length == 0 and room < budgets.num_tokens and may_exceed:
            length = self._chunk_length(head, budgets.num_tokens)  # an image stays whole whatever the chunk
        if length == 0:
            plan.result = AdmissionResult.OTHER
            if budgets.is_untouched:
                return None  # not even an empty step has room for a piece that must stay whole
        return length

    def _hit(self, sequence: Sequence) -> Hit:
        """What is cached of a sequence that is to be admitted."""
        return NO_HIT if sequence.holds_blocks else self._holdings.reuse.find_to_compute(sequence)

    def _can_hold(self, sequence: Sequence) -> AllocStatus:
        needed = sequence.num_blocks_needed()
        if sequence.num_tokens > self._longest or needed > self._num_usable:
            return AllocStatus.NEVER
        if not sequence.holds_blocks:
            hit = self._hit(sequence)
            status = self._holdings.can_hold_behind(hit, needed)
            if status is AllocStatus.OK and self._admission.is_on and not self._admission.fits(sequence, hit):
                return AllocStatus.LATER
            return status
        missing = self._holdings.num_missing(sequence)
        slots = self._holdings.num_missing_slots(sequence)
        return self._holdings.can_hold(missing, slots)

    def _make_way(self, head: Sequence) -> bool:
        """The head must wait for blocks: see to it that they come. True if the queue has changed."""
        way = self._way_for(head)
        if way is None:
            return False
        for sequence in way:
            if self._can_hold(sequence) is AllocStatus.OK:
                self._queues.waiting.remove(sequence)
                self._queues.waiting.appendleft(sequence)
            else:
                self._holdings.give_back_unused_pin(sequence)
                self._holdings.release(sequence)
                sequence.reset_for_recompute()
        return True

    def _way_for(self, head: Sequence) -> list[Sequence] | None:
        """Waiting sequences that hold blocks the head needs.

        One that can go on goes first: only its end gives its blocks back. If there is none, and nothing
        else in the engine will ever free a block, forks must give up their pins and compute for themselves.
        """
        queues = self._queues
        placed = queues.num_running + len(queues.prompted) + len(queues.held)
        if not self._config.preempt_only_on_need or self._holdings.rows.num_taken <= placed:
            return None
        holders = [s for s in queues.waiting if s.holds_blocks and not s.is_finished]
        for sequence in holders:
            if sequence.schedule.schedulable and self._can_hold(sequence) is AllocStatus.OK:
                return [sequence]
        if queues.num_running or queues.num_joining or queues.prompted or queues.held:
            return None
        return [s for s in holders if s.is_unadmitted_fork] or [s for s in holders if s is not head] or None

    def _chunk_length(self, sequence: Sequence, room: int) -> int:
        start = sequence.cache.num_tokens + self._hit(sequence).num_blocks * self._config.block_size
        checkpoints = sequence.schedule.chunk_checkpoints
        checkpoint = None
        if checkpoints:
            while checkpoints and checkpoints[0] <= start:
                checkpoints.popleft()
            checkpoint = next((at for at in checkpoints if at - start >= self._rules.min_chunk), None)
        snapshot = self._holdings.reuse.next_snapshot(sequence, start + self._rules.min_chunk)
        if snapshot is not None:
            checkpoint = snapshot if checkpoint is None else min(snapshot, checkpoint)
        tokens = sequence.stored_tokens(0, sequence.num_tokens)
        return chunk_length(tokens, start, room, self._rules, checkpoint)

    def _take_head(self, plan: PromptPlan, length: int) -> bool:
        """Side effects of admission: blocks, slots, status, ledgers. True: the prompt's last chunk."""
        sequence = self._queues.waiting.popleft()
        schedule = sequence.schedule
        assert schedule.status is SequenceStatus.WAITING, f"{sequence!r} was in waiting"
        if not sequence.holds_blocks:
            self._holdings.attach(sequence, sequence.num_blocks_needed(), self._hit(sequence))
            plan.num_cached_tokens += sequence.cache.num_tokens
        elif sequence.is_unadmitted_fork:
            schedule.branch_id = schedule.branch_id.removeprefix(FORK_MARK)
            plan.num_cached_tokens += sequence.cache.hit_tokens
            self._holdings.make_writable(sequence)
        elif self._holdings.is_shared(sequence):
            self._holdings.make_writable(sequence)
        schedule.chunked_rest_len = sequence.num_tokens - sequence.cache.num_tokens - length
        is_last = schedule.chunked_rest_len == 0
        if is_last:
            schedule.status = SequenceStatus.RUNNING
            self._holdings.info_slots.take(sequence)
            if self._config.engine_type is EngineType.NORMAL:
                self._queues.num_joining += 1
                plan.num_last_chunks += 1
        plan.sequences.append(sequence)
        plan.seqlens_q.append(length)
        return is_last

    def _drop_head(self, plan: PromptPlan) -> None:
        sequence = self._queues.waiting.popleft()
        self._holdings.give_back_unused_pin(sequence)
        if self._queues.end_queued(sequence):
            plan.ignored.append(sequence)
