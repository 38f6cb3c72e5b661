"""What a step's results change: ledgers, tokens, stops, and the queue a sequence goes to next."""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np

from shared_scheduler.config import EngineType, SchedulerConfig
from shared_scheduler.drafts import accepted_prefixes
from shared_scheduler.holdings import Holdings
from shared_scheduler.outputs import FirstToken, Int64Array, SchedulerOutputs, StepResults
from shared_scheduler.queues import Queues
from shared_scheduler.rows import Int32Array, RowIndices
from shared_scheduler.sequence import Sequence
from shared_scheduler.status import SequenceStatus


@dataclass(slots=True)
class _Outcome:
    """Collected while walking over the sequences of one step."""

    appended: list[int] = field(default_factory=list)
    num_appended: list[int] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    first_tokens: list[FirstToken] = field(default_factory=list)
    middle_chunks: list[Sequence] = field(default_factory=list)
    prompts_done: list[Sequence] = field(default_factory=list)


class ResultProcessor:
    """Applies the results of one step at a time, in the order the steps were launched."""

    def __init__(self, config: SchedulerConfig, queues: Queues, holdings: Holdings) -> None:
        self._config = config
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
        self._queues.num_joining -= outputs.num_last_chunks
        if outputs.prompt_run:
            return self._process_prompt(outputs, token_ids, now_s)
        if accepted is not None:
            return self._process_verified(outputs, token_ids, accepted, now_s)
        return self._process_decode(outputs, token_ids, now_s, is_overlapped)

    # ----- decode: one token for every row

    def _process_decode(
        self, outputs: SchedulerOutputs, token_ids: Int64Array, now_s: float, is_overlapped: bool
    ) -> StepResults:
        rows, at, sequences = self._holdings.rows, outputs.rows, outputs.sequences
        end_lengths, num_appended = outputs.cohort.end_lengths, outputs.cohort.ones
        self._finish_inflight(at, is_overlapped)
        gone: list[Sequence] = []
        finished: list[Sequence] = []
        if outputs.step_id <= self._queues.disturbed_step_id:
            is_live = np.array([s.status is SequenceStatus.RUNNING for s in sequences], bool)
            for i in np.flatnonzero(~is_live).tolist():
                self._drop(sequences[i], finished, gone)
            sequences = tuple(sequences[i] for i in np.flatnonzero(is_live).tolist())
            at, token_ids, end_lengths = at[is_live], token_ids[is_live], end_lengths[is_live]
            num_appended = is_live.astype(np.int32)
        num_tokens = rows.append_one_each(at, token_ids)
        for i in self._suspects(at, num_tokens, end_lengths, token_ids):
            if self.check_stop(sequences[i], int(token_ids[i]), int(num_tokens[i])):
                finished.append(sequences[i])
        first_tokens = self._first_of_forks(sequences, now_s) if self._queues.expects_first_tokens else ()
        if finished or gone:
            self._leave(finished, gone)
        return StepResults(token_ids, num_appended, tuple(finished), first_tokens)

    def _finish_inflight(self, at: RowIndices, is_overlapped: bool) -> None:
        rows = self._holdings.rows
        if not is_overlapped:
            rows.inflight[at] = 0
            rows.last_inflight[at] = 0
            return
        last = rows.last_inflight[at]
        left = np.where(rows.inflight[at] == last, np.int32(0), last)
        rows.inflight[at] = left
        rows.last_inflight[at] = left

    def _suspects(
        self, at: RowIndices, num_tokens: Int32Array, end_lengths: Int32Array, token_ids: Int64Array
    ) -> list[int]:
        """Positions whose sequences may have met a stop condition; most steps have none."""
        mask = num_tokens >= end_lengths
        for eos in self._eos:
            mask |= token_ids == eos
        if self._queues.num_with_stop_ids:
            mask |= self._holdings.rows.has_stop_ids[at] > 0
        positions: list[int] = mask.nonzero()[0].tolist()
        return positions

    # ----- decode with drafts: the accepted prefix, then the sampled token

    def _process_verified(
        self, outputs: SchedulerOutputs, token_ids: Int64Array, accepted: Int64Array, now_s: float
    ) -> StepResults:
        outcome = _Outcome()
        gone: list[Sequence] = []
        prefixes = accepted_prefixes(outputs.seqlens_q, accepted)
        for i, (sequence, prefix) in enumerate(zip(outputs.sequences, prefixes, strict=True)):
            sequence.schedule.finish_inflight_step()
            if sequence.status is not SequenceStatus.RUNNING:
                outcome.num_appended.append(0)
                self._drop(sequence, outcome.finished, gone)
                continue
            num_launched = int(outputs.seqlens_q[i])
            sequence.cache.advance_optimistically(num_launched)
            sequence.cache.commit_processed_tokens(len(prefix) + 1)
            sequence.draft.record(prefix, num_launched - 1)
            self._note_first_token(sequence, now_s, outcome)
            self._append(sequence, [*prefix, int(token_ids[i])], outcome)
        self._queues.running_is_ordered = False
        self._leave(outcome.finished, gone)
        return self._results(outcome)

    # ----- prompt

    def _process_prompt(self, outputs: SchedulerOutputs, token_ids: Int64Array, now_s: float) -> StepResults:
        outcome = _Outcome()
        gone: list[Sequence] = []
        complete: list[Sequence] = []
        for i, sequence in enumerate(outputs.sequences):
            sequence.schedule.finish_inflight_step()
            if sequence.is_finished:
                outcome.num_appended.append(0)
                self._drop(sequence, outcome.finished, gone)
                continue
            sequence.cache.advance_optimistically(int(outputs.seqlens_q[i]))
            if sequence.cache.num_tokens < sequence.num_tokens:
                assert sequence.status is SequenceStatus.WAITING, f"{sequence!r} after a middle chunk"
                outcome.num_appended.append(0)
                outcome.middle_chunks.append(sequence)
                continue
            self._note_first_token(sequence, now_s, outcome)
            self._append(sequence, [int(token_ids[i])], outcome)
            complete.append(sequence)
        self._queues.waiting.extendleft(reversed(outcome.middle_chunks))
        self._place(complete, outcome)
        self._leave(outcome.finished, gone)
        return self._results(outcome)

    def _place(self, complete: list[Sequence], outcome: _Outcome) -> None:
        """Where completed prompts go: on to decode, or held for their hand-over."""
        if self._config.engine_type is EngineType.NORMAL:
            # The reference keeps finished ones in `running` too, for the next decode step to sweep.
            self._queues.join_running([s for s in complete if self._like_reference or not s.is_finished])
            return
        for sequence in complete:
            if not sequence.is_finished:
                self._queues.held[sequence.request_id] = sequence
                outcome.prompts_done.append(sequence)

    # ----- any

    def _note_first_token(self, sequence: Sequence, now_s: float, outcome: _Outcome) -> None:
        if sequence.num_output_tokens == 0:
            outcome.first_tokens.append(FirstToken(sequence, now_s - sequence.arrival_s))

    def _first_of_forks(self, sequences: Many[Sequence], now_s: float) -> tuple[FirstToken, ...]:
        """Forks that began without output of their own have it now."""
        self._queues.expects_first_tokens = any(
            sequence.num_output_tokens == 0 for sequence in self._queues.by_id.values()
        )
        return tuple(FirstToken(s, now_s - s.arrival_s) for s in sequences if s.num_output_tokens == 1)

    def _append(self, sequence: Sequence, token_ids: list[int], outcome: _Outcome) -> None:
        """Append one at a time, so that nothing follows the token that ends the sequence."""
        count = 0
        for token_id in token_ids:
            sequence.append_token(token_id)
            outcome.appended.append(token_id)
            count += 1
            if self.check_stop(sequence, token_id, sequence.num_tokens):
                outcome.finished.append(sequence)
                break
        outcome.num_appended.append(count)

    def check_stop(self, sequence: Sequence, token_id: int, num_tokens: int) -> bool:
        """Does the newest token end the sequence? EOS and stop ids, then model length, then max_tokens."""
        sampling = sequence.sampling
        if (token_id in self._eos and not sampling.ignore_eos) or token_id in sampling.stop_token_ids:
            sequence.finish(SequenceStatus.FINISHED_STOPPED)
        elif (
            num_tokens > self._config.max_model_len
            or num_tokens - sequence.num_prompt_tokens >= sampling.max_tokens
        ):
            sequence.finish(SequenceStatus.FINISHED_LENGTH_CAPPED)
        return sequence.is_finished

    def _drop(self, sequence: Sequence, finished: list[Sequence], gone: list[Sequence]) -> None:
        """Ended or preempted while this step ran: its output is void."""
        if sequence.status is SequenceStatus.WAITING:
            self._holdings.release(sequence)
            sequence.reset_for_recompute()
            return
        gone.append(sequence)
        if sequence.request_id in self._queues.by_id and self._queues.by_id[sequence.request_id] is sequence:
            finished.append(sequence)

    def _leave(self, finished: list[Sequence], gone: list[Sequence]) -> None:
        """Ended sequences leave `running` and give everything back, unless a launched step contains them."""
        for sequence in finished:
            self._queues.report(sequence)
        if self._like_reference and self._config.engine_type is not EngineType.PROMPT:
            return
        ended = list(dict.fromkeys([*finished, *gone]))
        self._queues.leave_running(ended)
        for sequence in ended:
            if sequence.is_in_flight:
                self._queues.disturb()
            else:
                self._holdings.release(sequence)

    def _results(self, outcome: _Outcome) -> StepResults:
        return StepResults(
            np.array(outcome.appended, np.int64),
            np.array(outcome.num_appended, np.int32),
            tuple(outcome.finished),
            tuple(outcome.first_tokens),
            tuple(outcome.prompts_done),
        )
