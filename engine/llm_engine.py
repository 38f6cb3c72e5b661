"""The engine: executes what the scheduler decides, one step at a time."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np

from engine.handover_role import HandoverRole
from engine.ipc import AddRequest, EngineStats, RequestFailure, RequestOutput
from engine.model_runner import Int32Array, ModelRunner
from engine.sampler import NO_LOGPROBS, SampledTokens, Sampler, SamplingRows
from shared_scheduler import RequestError, Scheduler, SchedulerOutputs, Sequence, SequenceStatus, StepResults
from wire.services import OutputToken, ServiceError


class LLMEngine:
    """Scheduler, model, sampler and role; the caller's loop calls `poll` and, while `has_work`, `step`."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        sampler: Sampler,
        role: HandoverRole,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self._role = role
        self._clock = clock
        self.num_empty_steps = 0
        """Steps in a row that had nothing to run."""
        self._refused: list[RequestOutput] = []
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_preempted = 0
        self._busy_s = 0.0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def add(self, request: AddRequest) -> None:
        """Take a request in; one that cannot be served is answered by the next `poll` or `step`."""
        sequence = Sequence(
            request.request_id,
            request.prompt_token_ids,
            request.sampling,
            block_size=self._scheduler.config.block_size,
        )
        try:
            self._role.start(request, sequence, self._clock())
        except RequestError as error:
            failure = ServiceError(message=str(error), type="invalid_request_error", param="request_id")
            self._refused.append(
                RequestOutput(request_id=request.request_id, failure=RequestFailure(400, failure))
            )

    def abort(self, request_id: str) -> None:
        self._role.abort(request_id)

    def poll(self) -> Items[RequestOutput]:
        """Handle what the transfer threads reported; returns the failures."""
        refused, self._refused = self._refused, []
        return (*refused, *self._role.poll(self._clock()))

    def step(self) -> list[RequestOutput]:
        """Schedule, run, process: the outputs of every request that got a token or ended."""
        started_s = self._clock()
        outputs = self._scheduler.schedule()
        sampled = self._execute(outputs)
        results = self._scheduler.process_outputs(outputs, sampled.token_ids, now_s=self._clock())
        ended = (*outputs.finished, *outputs.ignored, *results.finished)
        self._role.after_step(results.prompts_done, ended)
        self.num_empty_steps = self.num_empty_steps + 1 if outputs.is_empty else 0
        if not outputs.is_empty:
            self._count(outputs, results, started_s)
        self._num_preempted += sum(s.status is SequenceStatus.FINISHED_PREEMPTED for s in ended)
        return report_step(outputs, results, sampled, ended)

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            num_free_blocks=scheduler.num_free_blocks,
            num_usable_blocks=scheduler.num_usable_blocks,
            num_handovers=self._role.num_handovers(),
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_preempted=self._num_preempted,
            busy_s=self._busy_s,
            transfer=self._role.transfer_counters(),
        )

    def close(self) -> None:
        self._role.close()

    def _execute(self, outputs: SchedulerOutputs) -> SampledTokens:
        if outputs.batch is None:
            return NOTHING_SAMPLED
        logits = self._runner.forward(outputs.batch)
        rows = sampling_rows(outputs.sequences, outputs.batch.output_indices)
        return self._sampler.sample(logits, rows)

    def _count(self, outputs: SchedulerOutputs, results: StepResults, started_s: float) -> None:
        self._num_steps += 1
        self._num_output_tokens += int(results.token_ids.size)
        if outputs.prompt_run:
            self._num_prompt_tokens += outputs.num_batched_tokens
        self._busy_s += self._clock() - started_s


NOTHING_SAMPLED = SampledTokens(np.empty(0, np.int64), None)


def sampling_rows(sequences: Items[Sequence], output_indices: Int32Array) -> SamplingRows:
    """How to draw the next token of each sequence."""
    params = [sequence.sampling for sequence in sequences]
    return SamplingRows(
        temperature=np.array([p.temperature for p in params], np.float32),
        top_k=np.array([p.top_k for p in params], np.int32),
        top_p=np.array([p.top_p for p in params], np.float32),
        seed=np.array([p.seed for p in params], np.int64),
        output_index=output_indices,
        num_logprobs=np.array([NO_LOGPROBS if p.logprobs is None else p.logprobs for p in params], np.int32),
    )


def report_step(
    outputs: SchedulerOutputs, results: StepResults, sampled: SampledTokens, ended: Items[Sequence]
) -> list[RequestOutput]:
    """One output for each sequence that got tokens or ended in this step."""
    reports = [
        RequestOutput(
            request_id=sequence.request_id,
            tokens=new_tokens(sequence, index, results, sampled),
            finish_reason=sequence.finish_reason,
            num_cached_tokens=sequence.cache.hit_tokens,
        )
        for index, sequence in enumerate(outputs.sequences)
        if results.num_appended[index]
    ]
    reported = {report.request_id for report in reports}
    reports += [
        RequestOutput(request_id=sequence.request_id, finish_reason=sequence.finish_reason)
        for sequence in ended
        if sequence.request_id not in reported
    ]
    return reports


def new_tokens(
    sequence: Sequence, index: int, results: StepResults, sampled: SampledTokens
) -> tuple[OutputToken, ...]:
    """The tokens that the step appended to its sequence number `index`."""
    num_new = int(results.num_appended[index])
    start = int(results.offsets[index])
    first_index = sequence.num_output_tokens - num_new
    logprobs = None if sampled.logprobs is None else sampled.logprobs.row(index)
    return tuple(
        OutputToken(index=first_index + i, token_id=int(token_id), logprobs=logprobs)
        for i, token_id in enumerate(results.token_ids[start : start + num_new])
    )
