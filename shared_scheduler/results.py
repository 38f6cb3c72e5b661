"""What a step's results change: ledgers, tokens, stops, and the queue a sequence goes to next."""

from collections.abc import Sequence as Many

import numpy as np

from shared_scheduler.admission import AdmissionEstimate
from shared_scheduler.config import EngineType, SchedulerConfig
from shared_scheduler.drafts import accepted_prefixes
from shared_scheduler.holdings import Holdings
from shared_scheduler.outputs import FirstToken, Int64Array, SchedulerOutputs, StepResults
from shared_scheduler.queues import Queues
from shared_scheduler.rows import Int32Array, RowIndices
from shared_scheduler.sequence import Sequence
from shared_scheduler.status import SequenceStatus


class ResultProcessor:
    """Applies the results of one step at a time, in the order the steps were launched."""

    def __init__(
        self, config: SchedulerConfig, queues: Queues, holdings: Holdings, admission: AdmissionEstimate
    ) -> None:
        self._config = config
        self._admission = admission
        self._queues = queues
        self._holdings = holdings
        self._eos = frozenset(config.eos_token_ids)
        self._like_reference = not config.preempt_only_on_need

    def process(
        self,
        outputs: SchedulerOutputs,
        token_ids: Int64Array,
        accepted: Int64Array | None,
        now_s: float,
        is_overlapped: bool,
    ) -> StepResults:
        """`is_overlapped`: another step was launched since this one."""
        self._holdings.rows.finish_inflight(outputs.rows, is_only_step=not is_overlapped)
        if outputs.prompt_run:
            return self._process_prompt(outputs, token_ids, now_s)
        if accepted is not None:
            return self._process_verified(outputs, token_ids, accepted, now_s)
        return self._process_decode(outputs, token_ids, now_s)

    # ----- a decode step: one token for every row

    def _process_decode(self, outputs: SchedulerOutputs, token_ids: Int64Array, now_s: float) -> StepResults:
        at, sequences, end_lengths = outputs.rows, outputs.sequences, outputs.cohort.end_lengths
        num_appended = outputs.cohort.ones
        finished: list[Sequence] = []
        gone: list[Sequence] = []
        if outputs.step_id <= self._queues.disturbed_step_id:
            live = self._drop_dead(outputs, finished, gone)
            sequences = tuple(sequences[i] for i in live.tolist())
            at, token_ids, end_lengths = at[live], token_ids[live], end_lengths[live]
            num_appended = _marks(live, len(outputs.sequences))
        num_tokens = self._holdings.rows.append_one_each(at, token_ids)
        finished += self._find_ended(sequences, at, num_tokens, end_lengths, token_ids)
        first_tokens = self._first_of_forks(sequences, now_s) if self._queues.expects_first_tokens else ()
        if finished or gone:
            self._leave(finished, gone)
        return StepResults(token_ids, num_appended, tuple(finished), first_tokens)

    def _first_of_forks(self, sequences: Many[Sequence], now_s: float) -> tuple[FirstToken, ...]:
        """Forks that began without output of their own have it now."""
        self._queues.expects_first_tokens = any(
            sequence.num_output_tokens == 0 for sequence in self._queues.by_id.values()
        )
        return tuple(FirstToken(s, now_s - s.arrival_s) for s in sequences if s.num_output_tokens == 1)

    # ----- a decode step with drafts: the accepted prefix, then the sampled token

    def _process_verified(
        self, outputs: SchedulerOutputs, token_ids: Int64Array, accepted: Int64Array, now_s: float
    ) -> StepResults:
        appended: list[int] = []
        num_appended = np.zeros(len(outputs.sequences), np.int32)
        finished: list[Sequence] = []
        gone: list[Sequence] = []
        first_tokens: list[FirstToken] = []
        prefixes = list(accepted_prefixes(outputs.seqlens_q, accepted))
        for i in self._drop_dead(outputs, finished, gone).tolist():
            sequence, num_launched = outputs.sequences[i], int(outputs.seqlens_q[i])
            sequence.cache.advance_optimistically(num_launched)
            sequence.cache.commit_processed_tokens(len(prefixes[i]) + 1)
            sequence.draft.record(len(prefixes[i]), num_launched - 1)
            if sequence.num_output_tokens == 0:
                first_tokens.append(FirstToken(sequence, now_s - sequence.arrival_s))
            tokens = self._append([*prefixes[i], int(token_ids[i])], sequence)
            appended += tokens
            num_appended[i] = len(tokens)
            if sequence.is_finished:
                finished.append(sequence)
        self._queues.running_is_ordered = False
        self._leave(finished, gone)
        return StepResults(np.array(appended, np.int64), num_appended, tuple(finished), tuple(first_tokens))

    def _append(self, token_ids: list[int], sequence: Sequence) -> list[int]:
        """Append one at a time, so that nothing follows the token that ends the sequence."""
        for count, token_id in enumerate(token_ids, 1):
            sequence.append_token(token_id)
            if self.check_stop(sequence, token_id, sequence.num_tokens):
                return token_ids[:count]
        return token_ids

    # ----- a prompt step

    def _process_prompt(self, outputs: SchedulerOutputs, token_ids: Int64Array, now_s: float) -> StepResults:
        rows, sequences, cohort = self._holdings.rows, outputs.sequences, outputs.cohort
        self._queues.num_joining -= outputs.num_last_chunks
        finished: list[Sequence] = []
        gone: list[Sequence] = []
        live = self._drop_dead(outputs, finished, gone)
        at = outputs.rows[live]
        uncached = rows.uncached[at] - outputs.seqlens_q[live]
        rows.uncached[at] = uncached
        done, middle = live[uncached == 0], live[uncached > 0]
        self._queues.waiting.computed(sequences)
        self._queues.waiting.extendleft(sequences[i] for i in reversed(middle.tolist()))

        at, token_ids = outputs.rows[done], token_ids[done]
        complete = [sequences[i] for i in done.tolist()]
        num_tokens = rows.append_one_each(at, token_ids)
        rows.uncached[at] = 1
        for i in live.tolist():
            self._holdings.store(sequences[i])
        is_first = num_tokens - cohort.num_prompt_tokens[done] == 1
        first_tokens = [complete[i] for i in is_first.nonzero()[0].tolist()]
        finished += self._find_ended(complete, at, num_tokens, cohort.end_lengths[done], token_ids)
        prompts_done = self._place(complete)
        self._leave(finished, gone)
        return StepResults(
            token_ids,
            _marks(done, len(sequences)),
            tuple(finished),
            tuple(FirstToken(s, now_s - s.arrival_s) for s in first_tokens),
            tuple(prompts_done),
        )

    def _place(self, complete: list[Sequence]) -> list[Sequence]:
        """Completed prompts go on to decode, or are held for their hand-over; returns the held."""
        if self._config.engine_type is EngineType.NORMAL:
            # The reference keeps finished ones in `running` too, for the next decode step to sweep.
            self._queues.join_running([s for s in complete if self._like_reference or not s.is_finished])
            return []
        held = [sequence for sequence in complete if not sequence.is_finished]
        self._queues.held.update((sequence.request_id, sequence) for sequence in held)
        return held

    # ----- any

    def status_after(self, sequence: Sequence, token_id: int, num_tokens: int) -> SequenceStatus | None:
        """How the sequence ends with this as its newest of `num_tokens` tokens; None: it goes on.

        EOS and stop ids come first, then the model's length, then max_tokens.
        """
        sampling = sequence.sampling
        if (token_id in self._eos and not sampling.ignore_eos) or token_id in sampling.stop_token_ids:
            return SequenceStatus.FINISHED_STOPPED
        num_outputs = num_tokens - sequence.num_prompt_tokens
        if num_tokens > self._config.max_model_len or num_outputs >= sampling.max_tokens:
            return SequenceStatus.FINISHED_LENGTH_CAPPED
        return None

    def check_stop(self, sequence: Sequence, token_id: int, num_tokens: int) -> bool:
        """End the sequence if its newest token does."""
        status = self.status_after(sequence, token_id, num_tokens)
        if status is not None:
            sequence.finish(status)
        return sequence.is_finished

    def _find_ended(
        self,
        sequences: Many[Sequence],
        at: RowIndices,
        num_tokens: Int32Array,
        end_lengths: Int32Array,
        token_ids: Int64Array,
    ) -> list[Sequence]:
        """Those whose newest token ends them; only suspects are looked at one by one."""
        mask = num_tokens >= end_lengths
        for eos in self._eos:
            mask |= token_ids == eos
        if self._queues.num_with_stop_ids:
            mask |= self._holdings.rows.has_stop_ids[at] > 0
        return [
            sequences[i]
            for i in mask.nonzero()[0].tolist()
            if self.check_stop(sequences[i], int(token_ids[i]), int(num_tokens[i]))
        ]

    def _drop_dead(
        self, outputs: SchedulerOutputs, finished: list[Sequence], gone: list[Sequence]
    ) -> RowIndices:
        """Positions that are alive. The output of what ended or was preempted while the step ran is void."""
        live = []
        for i, sequence in enumerate(outputs.sequences):
            if sequence.is_finished:
                gone.append(sequence)
                if self._queues.is_unreported(sequence):
                    finished.append(sequence)
            elif sequence.status is SequenceStatus.WAITING and not outputs.prompt_run:
                self._holdings.release(sequence)
                sequence.reset_for_recompute()
            else:
                live.append(i)
        return np.array(live, np.intp)

    def _leave(self, finished: list[Sequence], gone: list[Sequence]) -> None:
        """Ended sequences leave `running` and give everything back, unless a launched step contains them."""
        for sequence in finished:
            self._queues.report(sequence)
        if self._admission.is_on:
            self._admission.ended(finished)
        if self._like_reference and self._config.engine_type is not EngineType.PROMPT:
            return
        ended = list(dict.fromkeys([*finished, *gone]))
        self._queues.leave_running(ended)
        for sequence in ended:
            if sequence.is_in_flight:
                self._queues.disturb()
            else:
                self._holdings.release(sequence)


def _marks(positions: RowIndices, count: int) -> Int32Array:
    """1 at the given positions, 0 elsewhere; int32[count]."""
    marks = np.zeros(count, np.int32)
    marks[positions] = 1
    return marks
