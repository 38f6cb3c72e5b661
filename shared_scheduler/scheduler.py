"""The scheduler: requests in, one step out, results back. `queues` tells a sequence's life."""

from collections import deque
from collections.abc import Sequence as Many

import numpy as np

from shared_scheduler.admission import AdmissionEstimate
from shared_scheduler.batch import Batch, BatchBuilder
from shared_scheduler.block_manager import AllocStatus
from shared_scheduler.cohort import Cohort, CohortCache
from shared_scheduler.config import EngineType, SchedulerConfig
from shared_scheduler.decode import DecodePlan, DecodePlanner, DescendingOrder, stable_descending
from shared_scheduler.drafts import DraftChooser
from shared_scheduler.errors import CorruptionError, RequestError, SchedulerError
from shared_scheduler.forks import Forks
from shared_scheduler.holdings import Holdings
from shared_scheduler.loans import Import, Loan
from shared_scheduler.outputs import Int64Array, SchedulerOutputs, StepResults
from shared_scheduler.prefill import PromptPlan, PromptPlanner
from shared_scheduler.prefix_cache import PrefixCache
from shared_scheduler.queues import Queues
from shared_scheduler.remote import RemoteArrivals
from shared_scheduler.results import ResultProcessor
from shared_scheduler.reuse import CacheStats
from shared_scheduler.rows import Int32Array
from shared_scheduler.sequence import Sequence
from shared_scheduler.status import FINISH_REASONS, SequenceStatus
from shared_scheduler.step_time import StepTimeModel
from shared_scheduler.voting import GroupVote, SingleRank, StepClock, agree_on_config
from shared_scheduler.waiting import make_waiting_queue
from wire.cache import CacheEvent
from wire.sampling import SamplingParams
from wire.services import FinishReason

MAX_STEPS_IN_FLIGHT = 2


class Scheduler:
    """One engine's scheduler. Not thread-safe; the engine's step loop owns it.

    Synchronous use: schedule(), run, process_outputs(). Overlapped use: schedule() for the next step before
    process_outputs() of the one that runs; results come in launch order, at most two steps at a time.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        group: GroupVote | None = None,
        graph_sizes: tuple[int, ...] = (),
        order: DescendingOrder = stable_descending,
    ) -> None:
        """`group`: the ranks to step alike with; they compare configurations here.

        `graph_sizes`: token counts a decode step is padded to (`StepTimeModel`). `order`: how running
        sequences of equal output length are ordered when blocks run out.
        """
        self.config = config
        self._group = group or SingleRank()
        agree_on_config(config, self._group)
        self._clock = StepClock(config)
        self._holdings = Holdings(config)
        self._queues = Queues(self._holdings, make_waiting_queue(config, self._holdings.reuse))
        self._admission = AdmissionEstimate(config, self._holdings)
        self._prompts = PromptPlanner(config, self._queues, self._holdings, self._admission)
        self._step_time = StepTimeModel(graph_sizes)
        drafts = DraftChooser(config, self._step_time)
        self._decodes = DecodePlanner(
            config, self._queues, self._holdings, self._prompts, drafts, self._admission, order
        )
        self._results = ResultProcessor(config, self._queues, self._holdings, self._admission)
        self._forks = Forks(config, self._queues, self._holdings)
        self._remote = RemoteArrivals(config, self._queues, self._holdings, self._results, self._admission)
        self._batches = BatchBuilder(self._holdings, config.block_size, config.position_limit)
        self._in_flight: deque[SchedulerOutputs] = deque()
        self._cohorts = CohortCache(self._holdings.rows)

    # ----- requests

    def add_sequence(self, sequence: Sequence, now_s: float) -> None:
        """Queue a request (NORMAL and PROMPT engines). Reserves nothing physical."""
        if self.config.engine_type is EngineType.COMPLETION:
            raise RequestError("a completion engine takes requests through reserve_remote")
        self._check_block_size(sequence)
        self._queues.register(sequence)
        sequence.arrival_s = now_s
        self._queues.waiting.append(sequence)

    def abort(self, request_id: str) -> None:
        """Mark a request; the next step sweeps it. Unknown and ended requests are ignored."""
        self.fail(request_id, SequenceStatus.FINISHED_ABORTED)

    def fail(self, request_id: str, status: SequenceStatus) -> None:
        """`abort` with another ending, such as FINISHED_VE_FAILED or FINISHED_SO_FAILED."""
        sequence = self._queues.by_id.get(request_id)
        if sequence is None or sequence.is_finished:
            return
        sequence.finish(status)
        self._queues.has_marked = True
        if sequence.is_in_flight:
            self._queues.disturb()

    def set_schedulable(self, request_id: str) -> None:
        """The request's images are encoded: it no longer blocks the queue."""
        sequence = self._queues.by_id.get(request_id)
        if sequence is not None:
            sequence.schedule.schedulable = True

    def release_handover(self, sequence: Sequence) -> None:
        """PROMPT engine: nobody reads the sequence's blocks any more."""
        if self._queues.held.pop(sequence.request_id, None) is not sequence:
            raise SchedulerError(f"{sequence.request_id!r} is not held for a hand-over")
        self._queues.report(sequence)
        self._holdings.release(sequence)

    def fork(
        self,
        parent: Sequence,
        request_id: str,
        sampling: SamplingParams | None = None,
        *,
        output_token_ids: Many[int] | None = None,
        now_s: float,
    ) -> Sequence:
        """A new request that shares what `parent` has computed.

        Its tokens are the parent's prompt and `output_token_ids` (None: all outputs of the parent so far;
        empty: it samples its own first token by computing the last prompt token once more, which a model
        with state cannot do). `RequestError` if nothing can be shared.
        """
        return self._forks.fork(parent, request_id, sampling, output_token_ids, now_s)

    def set_drafts(self, sequence: Sequence, token_ids: Many[int], confidences: Many[float] = ()) -> None:
        """Propose what may follow the sequence's newest token; verified in its next decode step.

        `confidences`: probability of each draft, given those before it; without them past acceptance
        counts. Of a sequence in flight the newest token is the one that its newest step will draw behind
        the drafts of that step, if all of these are accepted. Ignored unless the sequence decodes.
        """
        if sequence.status is not SequenceStatus.RUNNING:
            return
        count = self.config.max_num_draft_tokens
        sequence.draft.token_ids = tuple(token_ids[:count])
        sequence.draft.confidences = tuple(confidences[:count])
        self._queues.has_drafts |= bool(sequence.draft.token_ids)

    def observe_decode(self, outputs: SchedulerOutputs, forward_s: float, sampler_s: float) -> None:
        """A decode step took this long: feeds the choice of how many drafts to verify."""
        self._step_time.observe(len(outputs.sequences), outputs.num_batched_tokens, forward_s, sampler_s)

    def predict_decode_s(self, num_sequences: int, num_tokens: int) -> float | None:
        """Seconds of a decode step with so many tokens to compute; None until steps were measured."""
        if not self._step_time.is_measured:
            return None
        return float(self._step_time.predict_s(num_sequences, np.array([num_tokens]))[0])

    # ----- COMPLETION: KV comes from a prompt engine

    def reserve_remote(self, sequence: Sequence, now_s: float) -> AllocStatus:
        """Take blocks for the whole prompt and a slot, to be filled by a transfer."""
        self._check_block_size(sequence)
        return self._remote.reserve(sequence, now_s)

    def admit_arrived(self, sequence: Sequence, first_token_id: int) -> None:
        """All KV of the prompt is there; `first_token_id` becomes output 0."""
        self._remote.admit(sequence, first_token_id)

    def drop_remote(self, sequence: Sequence, reason: FinishReason = "abort") -> None:
        """Give up before arrival; no read may be in flight any more."""
        self._remote.drop(sequence, reason)

    # ----- blocks that move between the caches of two engines

    def lend(self, token_ids: Many[int], cache_salt: str = "", first_block: int = 0) -> Loan | None:
        """Pin what is cached of these tokens from a block on, for a peer to read; None: nothing is."""
        return self._holdings.loans.lend(_as_tokens(token_ids), cache_salt, first_block)

    def give_back(self, loan: Loan) -> None:
        """The peer reads no more."""
        self._holdings.loans.give_back(loan)

    def reserve_import(
        self, token_ids: Many[int], cache_salt: str, first_block: int, num_blocks: int
    ) -> Import | None:
        """Take blocks for full blocks of these tokens that a peer has cached.

        None: there is no room, or the blocks before them are not cached here (any more), or the model keeps
        state, which cached blocks alone do not restore.
        """
        if self._holdings.states is not None:
            return None
        return self._holdings.loans.reserve(_as_tokens(token_ids), cache_salt, first_block, num_blocks)

    def commit_import(self, wanted: Import) -> None:
        """The blocks are filled: prompts find them from now on."""
        self._holdings.loans.commit(wanted)

    def drop_import(self, wanted: Import) -> None:
        """Give up; no read into the blocks may be in flight any more."""
        self._holdings.loans.drop(wanted)

    # ----- steps

    def schedule(self) -> SchedulerOutputs:
        """Decide the next step. Without batch and copies it needs no process_outputs, but allows it."""
        if len(self._in_flight) == MAX_STEPS_IN_FLIGHT:
            raise SchedulerError("two steps are in flight: process the older one's results first")
        self._queues.last_step_id += 1
        self._holdings.start_step(self._queues.last_step_id)
        swept = self._queues.sweep_marked() if self._queues.has_marked else []
        prompt_plan = self._plan_prompt()
        if prompt_plan is None:
            outputs = self._decode_outputs(self._decodes.plan(bool(self._in_flight)), swept)
        else:
            outputs = self._prompt_outputs(prompt_plan, swept)
        self._clock.tick(outputs.prompt_run)
        if not outputs.is_empty:
            self._in_flight.append(outputs)
        return outputs

    def process_outputs(
        self,
        outputs: SchedulerOutputs,
        token_ids: Int64Array,
        accepted: Int64Array | None = None,
        *,
        now_s: float,
    ) -> StepResults:
        """Apply a step's results: one sampled id per scheduled sequence (ignored for a middle chunk).

        `accepted`: flat, seqlens_q[i] - 1 ids for each sequence of a step with drafts; the first -1 and all
        after it were rejected.
        """
        if outputs.is_empty:
            self._holdings.finish_step(outputs.step_id)
            return StepResults(np.empty(0, np.int64), np.empty(0, np.int32))
        if not self._in_flight or self._in_flight[0] is not outputs:
            raise SchedulerError(f"results of step {outputs.step_id} are out of order")
        if len(token_ids) != len(outputs.sequences):
            raise SchedulerError(f"{len(token_ids)} sampled ids for {len(outputs.sequences)} sequences")
        self._in_flight.popleft()
        self._holdings.finish_step(outputs.step_id)
        return self._results.process(outputs, token_ids, accepted, now_s, bool(self._in_flight))

    def reason_after(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """How the sequence would end with this as its next token; None: it would go on."""
        status = self._results.status_after(sequence, token_id, sequence.num_tokens + 1)
        return None if status is None else FINISH_REASONS[status]

    def has_work(self) -> bool:
        """Would schedule() do something useful now?"""
        queues = self._queues
        if queues.has_marked or queues.num_running or queues.prompted or self._holdings.has_state_to_keep:
            return True
        return self._prompts.has_admissible_head()

    # ----- figures

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody uses, those with cached content among them."""
        return self._holdings.blocks.num_free

    @property
    def num_usable_blocks(self) -> int:
        return self._holdings.blocks.num_usable

    @property
    def num_free_slots(self) -> int | None:
        return None if self._holdings.states is None else self._holdings.states.num_free

    @property
    def num_usable_slots(self) -> int | None:
        return None if self._holdings.states is None else self._holdings.states.num_usable

    @property
    def num_running(self) -> int:
        return self._queues.num_running + self._queues.num_joining

    @property
    def num_waiting(self) -> int:
        """Queued for prefill, for remote KV, or for a place in the decode batch."""
        return len(self._queues.waiting) + len(self._queues.remote) + len(self._queues.prompted)

    @property
    def num_held(self) -> int:
        """PROMPT: sequences whose blocks wait for their hand-over to be released."""
        return len(self._queues.held)

    @property
    def cache(self) -> PrefixCache | None:
        """The prefix cache; None where `prefix_cache` is off."""
        return self._holdings.reuse.cache

    def take_cache_events(self) -> tuple[CacheEvent, ...]:
        """What changed in the prefix cache since the last call; nothing unless `cache_events` is set."""
        events = None if self.cache is None else self.cache.events
        return () if events is None else events.take()

    def cache_stats(self) -> CacheStats:
        return self._holdings.reuse.stats()

    @property
    def usage(self) -> float:
        return self._holdings.blocks.usage()

    def get(self, request_id: str) -> Sequence | None:
        """The live sequence of a request."""
        return self._queues.by_id.get(request_id)

    def check_invariants(self) -> None:
        """AssertionError if blocks, slots, rows and queues contradict each other."""
        self._holdings.check_invariants(self._queues.holders())
        self._queues.check_invariants()
        if self.config.num_draft_slots:
            assert all(s.draft.info_slot is not None for s in self._queues.running_sequences())

    # ----- building

    def _plan_prompt(self) -> PromptPlan | None:
        """The prompt step to run now; None: a decode step."""
        kind = self.config.engine_type
        if kind is EngineType.PROMPT:
            return self._prompts.plan()
        if kind is EngineType.COMPLETION or not self._clock.is_voting_point:
            return None
        if not self._clock.vote_prompt(self._group, self._wants_prompt()):
            return None
        plan = self._prompts.plan()
        return plan if self._clock.vote_built(self._group, not plan.is_empty) else None

    def _wants_prompt(self) -> bool:
        head = self._queues.waiting.head()
        if head is None or not head.schedule.schedulable:
            return False
        if self.usage <= self.config.prefill_watermark:
            return True
        # The reference stops here and waits for ever when a prompt that is half computed, and needs nothing
        # more, is all that fills the pool.
        return self.config.preempt_only_on_need and (head.holds_blocks or not self.num_running)

    def _prompt_outputs(self, plan: PromptPlan, swept: list[Sequence]) -> SchedulerOutputs:
        rows = np.array([sequence.row for sequence in plan.sequences], np.intp)
        cohort = self._cohorts.of(rows, tuple(plan.sequences))
        seqlens_q = np.array(plan.seqlens_q, np.int32)
        batch = self._batches.prompt(cohort, seqlens_q) if plan.sequences else None
        self._holdings.rows.start_inflight(rows, seqlens_q, is_only_step=False)
        return SchedulerOutputs(
            self._queues.last_step_id,
            True,
            cohort,
            seqlens_q,
            batch,
            tuple(swept),
            tuple(plan.ignored),
            self._holdings.take_copies(),
            plan.num_last_chunks,
            plan.num_cached_tokens,
            plan.result,
        )

    def _decode_outputs(self, plan: DecodePlan, swept: list[Sequence]) -> SchedulerOutputs:
        cohort = self._cohorts.again(plan.rows)
        batch = self._decode_batch(cohort, plan) if plan.rows.size else None
        return SchedulerOutputs(
            self._queues.last_step_id,
            False,
            cohort,
            cohort.ones if batch is None else batch.seqlens_q,
            batch,
            (*swept, *plan.finished),
            tuple(plan.ignored),
            self._holdings.take_copies(),
        )

    def _decode_batch(self, cohort: Cohort, plan: DecodePlan) -> Batch:
        previous = self._in_flight[-1].rows if self._in_flight else None
        if plan.has_drafts:
            batch = self._batches.verify(cohort, plan.reach, previous)
            for sequence in cohort.sequences:
                sequence.draft.token_ids = ()  # from here on they count as in flight
        else:
            batch = self._batches.decode(cohort, plan.reach, previous)
        self._check_positions(int(plan.reach[0]))
        self._holdings.rows.start_inflight(plan.rows, batch.seqlens_q, is_only_step=previous is None)
        return batch

    def _check_positions(self, longest: int) -> None:
        """A decode step pads every q to the largest and may look one set of drafts further."""
        end = longest + 2 * self.config.max_num_draft_tokens
        if end > self.config.position_limit:
            raise CorruptionError(f"a step reaches position {end}, beyond {self.config.position_limit}")

    def _check_block_size(self, sequence: Sequence) -> None:
        if sequence.cache.block_size != self.config.block_size:
            raise RequestError(
                f"{sequence.request_id!r} counts blocks of {sequence.cache.block_size} tokens, the pool has"
                f" block_size={self.config.block_size}"
            )


def _as_tokens(token_ids: Many[int]) -> Int32Array:
    return np.asarray(token_ids, np.int32)
