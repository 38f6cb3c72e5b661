"""The engine: executes what the scheduler decides, one step at a time."""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.activity import ActivityLog
from engine.choices import Choices, FirstDraws
from engine.copies import has_copies
from engine.drafters import Drafter
from engine.errors import GrammarQueueFull
from engine.grammars import Grammar, GrammarAdmission, Grammars
from engine.group import Solo, StepGroup
from engine.handover_role import HandoverRole
from engine.histories import Histories
from engine.ipc import AddRequest, EngineStats, RequestFailure, RequestOutput
from engine.model_runner import Runner
from engine.prompt_logprobs import keep_scores, prompt_spans, take_prompt_logprobs
from engine.sampler import Sampler
from engine.speculation import Speculation
from engine.step_executor import (
    ModelStep,
    OverlappedExecutor,
    StepExecutor,
    StepOutcome,
    SynchronousExecutor,
)
from shared_scheduler import (
    EngineType,
    RequestError,
    Scheduler,
    SchedulerOutputs,
    Sequence,
    SequenceStatus,
    StepResults,
)
from wire.cache import CacheEvent
from wire.services import OutputToken, ServiceError, TokenLogprobs


class OtherRanks(Protocol):
    """Processes of this machine that the engine cannot compute without."""

    def check(self) -> None:
        """`GroupError` if one is lost."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose results have not been processed."""

    outputs: SchedulerOutputs
    draws: FirstDraws
    outcome: Future[StepOutcome]
    launched_s: float


class LLMEngine:
    """Scheduler, model, sampler and role; the caller's loop calls `poll` and, if `takes_step`, `step`."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampler: Sampler,
        role: HandoverRole,
        clock: Callable[[], float] = time.monotonic,
        *,
        choices: Choices | None = None,
        group: StepGroup | None = None,
        overlap: bool = False,
        drafter: Drafter | None = None,
        grammars: Grammars | None = None,
        activity_log: ActivityLog | None = None,
        ranks: OtherRanks | None = None,
    ) -> None:
        """`choices`: the book that the role shares; None where the role has none.

        `group`: the ranks this engine steps with, the ones its scheduler votes with.

        `overlap`: schedule a step, and process the results of the one before, while the model runs.

        `drafter`: guesses of several tokens for every sequence, verified in one step.

        `grammars`: for structured output; without it such requests are refused.

        `ranks`: the processes that compute with us; `GroupError` from `poll` or `step` when one is lost.
        """
        self._scheduler = scheduler
        model_step = ModelStep(runner, sampler, eos_token_ids=scheduler.config.eos_token_ids, clock=clock)
        self._executor: StepExecutor = (
            OverlappedExecutor(model_step) if overlap else SynchronousExecutor(model_step)
        )
        self._in_flight: deque[LaunchedStep] = deque()
        self._role = role
        self._choices = choices or Choices(scheduler)
        self._group = group or Solo()
        self._histories = Histories()
        self._admission = GrammarAdmission(grammars)
        self._speculation = None if drafter is None else Speculation(scheduler, drafter)
        self._clock = clock
        self._activity_log = activity_log
        self.ranks = ranks
        self.num_empty_steps = 0
        """Steps in a row that had nothing to run, on any rank."""
        self._refused: list[RequestOutput] = []
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_decoded_sequences = 0
        self._num_preempted = 0
        self._num_placeholder_steps = 0
        self._busy_s = 0.0
        self._busy_until_s = 0.0

    @property
    def has_work(self) -> bool:
        """Is there something to step for, here or on another rank?"""
        return self._has_own_work or self._group.is_busy

    @property
    def _has_own_work(self) -> bool:
        return bool(self._in_flight) or self._scheduler.has_work()

    def takes_step(self) -> bool:
        """Is it time for `step`? In a group the other ranks are asked, and answers waited for."""
        return self._group.takes_step(self._has_own_work)

    @property
    def num_free_blocks(self) -> int:
        return self._scheduler.num_free_blocks

    def add(self, request: AddRequest) -> None:
        """Take a request in; one that cannot be served is answered by a `poll` or `step`."""
        if request.sampling.structured is None:
            self._start(request)
        else:
            self._admission.hold(request, self._clock())

    def _start(self, request: AddRequest, grammar: Grammar | None = None) -> None:
        sequence = self._sequence(request)
        sequence.structured.grammar = grammar
        try:
            self._choices.check(request)
            self._role.start(request, sequence, self._clock())
        except RequestError as error:
            self._refuse(request, error)
        else:
            self._choices.add(request)

    def _refuse(self, request: AddRequest, error: Exception) -> None:
        if isinstance(error, GrammarQueueFull):
            message = ServiceError(message=str(error), type="server_error", code="grammar_queue_full")
            failure = RequestFailure(503, message)
        else:
            failure = RequestFailure(400, ServiceError(message=str(error), type="invalid_request_error"))
        self._refused.append(RequestOutput(request_id=request.request_id, failure=failure, is_last=True))

    def _sequence(self, request: AddRequest) -> Sequence:
        """Replayed tokens are output, as those of a preempted sequence: computed again, never sampled."""
        num_prompt_tokens = len(request.prompt_token_ids) - request.num_replayed_tokens
        sequence = Sequence(
            request.request_id,
            request.prompt_token_ids[:num_prompt_tokens],
            request.sampling,
            block_size=self._scheduler.config.block_size,
            cache_salt=request.cache_salt,
            priority=request.priority,
            routing_key=request.routing_key,
        )
        sequence.store_tokens(np.array(request.prompt_token_ids[num_prompt_tokens:], np.int32))
        return sequence

    def abort(self, request_id: str, *, keeps_handover: bool = False) -> None:
        """Nobody wants the request here: end every choice of it. `keeps_handover` as of `ipc.Abort`."""
        self._admission.drop(request_id)
        self._choices.abort(request_id)
        self._role.abort(request_id, keeps_handover=keeps_handover)

    def withdraw(self, handover_id: str) -> None:
        """Nobody will take this hand-over: its blocks go back as soon as no reader can touch them."""
        self._role.withdraw(handover_id)

    def poll(self) -> Items[RequestOutput]:
        """Handle what the transfer threads and the grammar compiler reported; returns the failures."""
        if self.ranks is not None:
            self.ranks.check()
        for request, result in self._admission.ready(self._clock()):
            if isinstance(result, Grammar):
                self._start(request, result)
            else:
                self._refuse(request, result)
        refused, self._refused = self._refused, []
        return (*refused, *self._choices.addressed(self._role.poll(self._clock())))

    def step(self) -> list[RequestOutput]:
        """Launch a step and process the oldest one: the outputs of every request that got a token or ended.

        With overlap, the step just launched runs on: its results belong to the next call.
        """
        reports: list[RequestOutput] = []
        runs_on = self._may_schedule() and self._launch(self._schedule(reports), reports)
        num_ahead = self._executor.num_ahead if runs_on else 0
        while len(self._in_flight) > num_ahead:
            self._finish(self._in_flight.popleft(), reports)
        return reports

    def take_cache_events(self) -> tuple[CacheEvent, ...]:
        """What changed in the prefix cache since the last call."""
        return self._scheduler.take_cache_events()

    def stats(self) -> EngineStats:
        scheduler, cache = self._scheduler, self._scheduler.cache_stats()
        return EngineStats(
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            num_free_blocks=scheduler.num_free_blocks,
            num_usable_blocks=scheduler.num_usable_blocks,
            num_free_slots=scheduler.num_free_slots or 0,
            num_usable_slots=scheduler.num_usable_slots or 0,
            num_handovers=self._role.num_handovers(),
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_decoded_sequences=self._num_decoded_sequences,
            num_drafted_tokens=self._speculation.num_drafted if self._speculation else 0,
            num_accepted_tokens=self._speculation.num_accepted if self._speculation else 0,
            num_preempted=self._num_preempted,
            num_cache_query_tokens=cache.num_query_tokens,
            num_cache_hit_tokens=cache.num_hit_tokens,
            num_cached_blocks=cache.num_cached_blocks,
            num_evicted_blocks=cache.num_evicted_blocks,
            num_placeholder_steps=self._num_placeholder_steps,
            group_wait_s=self._group.wait_s,
            busy_s=self._busy_s,
            transfer=self._role.transfer_counters(),
            peers=self._role.transfer_peers(),
        )

    def close(self) -> None:
        self._admission.close()
        self._executor.close()
        if self.ranks is not None:
            self.ranks.close()
        self._role.close()
        self._group.close()

    def _may_schedule(self) -> bool:
        if not self._in_flight:
            return True
        return self._scheduler.has_work() and not self._goes_on(self._in_flight[-1].outputs)

    def _goes_on(self, outputs: SchedulerOutputs) -> bool:
        """Does a sequence of this prompt step belong into the next step, which it would miss?"""
        is_normal = self._scheduler.config.engine_type is EngineType.NORMAL
        return outputs.prompt_run and (
            is_normal or any(sequence.schedule.chunked_rest_len for sequence in outputs.sequences)
        )

    def _schedule(self, reports: list[RequestOutput]) -> SchedulerOutputs:
        """The next step, which every rank of the group begins now."""
        outputs = self._scheduler.schedule()
        self._begin(outputs)
        if not self._group.is_quiet:
            return outputs
        while self._group.is_quiet:
            # Nothing comes in between, so what is empty everywhere stays empty until the ranks vote.
            self._launch(outputs, reports)
            outputs = self._scheduler.schedule()
        self._begin(outputs)
        return outputs

    def _begin(self, outputs: SchedulerOutputs) -> None:
        """Tell the other ranks of this step, as the model's own collectives would."""
        is_empty = outputs.is_empty and not has_copies(outputs.copies) and not self._in_flight
        is_empty_everywhere = self._group.begin_step(
            outputs.step_id,
            outputs.prompt_run,
            is_empty=is_empty,
            has_work=not is_empty or self._scheduler.has_work(),
        )
        self.num_empty_steps = self.num_empty_steps + 1 if is_empty_everywhere else 0
        self._num_placeholder_steps += is_empty and not is_empty_everywhere

    def _launch(self, outputs: SchedulerOutputs, reports: list[RequestOutput]) -> bool:
        """Start what was scheduled and report what ended in the scheduling; True if a step may run on."""
        copies = outputs.copies
        if not outputs.is_empty or has_copies(copies):
            launched_s = self._clock()
            draws = self._choices.draws(outputs)
            outcome = self._executor.launch(
                outputs, draws, self._histories.updates(outputs), prompt_spans(outputs)
            )
            self._in_flight.append(LaunchedStep(outputs, draws, outcome, launched_s))
        ended = (*outputs.finished, *outputs.ignored)
        self._role.after_step((), ended)
        self._num_preempted += sum(s.status is SequenceStatus.FINISHED_PREEMPTED for s in ended)
        reports += self._choices.addressed(map(report_end, ended))
        # A sequence that got a clone may have been preempted in the same scheduling: the clone must be made
        # before anyone, a transfer for instance, can write into the block that went back.
        return not (outputs.is_empty or copies.clone_blocks or copies.clone_states)

    def _finish(self, step: LaunchedStep, reports: list[RequestOutput]) -> None:
        """Wait for a step's results, apply and report them."""
        outcome = step.outcome.result()
        outputs, draws, now_s = step.outputs, step.draws, self._clock()
        token_ids = self._choices.tokens_of_sequences(outputs, draws, outcome.token_ids)
        for index in outcome.failed:
            self._scheduler.fail(outputs.sequences[index].request_id, SequenceStatus.FINISHED_SO_FAILED)
        keep_scores(outputs, outcome.scored)
        results = self._scheduler.process_outputs(outputs, token_ids, outcome.accepted, now_s=now_s)
        self._choices.part(outputs, draws, results, outcome.drawn, now_s)
        if outputs.prompt_run:
            self._role.announce([s for s in outputs.sequences if s.status is SequenceStatus.WAITING])
        self._role.after_step(results.prompts_done, results.finished)
        if self._speculation is not None:
            self._speculation.after_step(
                outputs, outcome, self._in_flight[-1].outputs if self._in_flight else None
            )
        new_reports = self._choices.addressed(report_results(outputs, results, outcome))
        self._count(step, sum(len(report.tokens) for report in new_reports))
        reports += new_reports

    def _count(self, step: LaunchedStep, num_output_tokens: int) -> None:
        """Time counts once where steps overlap."""
        if step.outputs.is_empty:
            return
        now_s = self._clock()
        busy_s = now_s - max(step.launched_s, self._busy_until_s)
        self._busy_until_s = now_s
        self._busy_s += busy_s
        self._num_steps += 1
        self._num_output_tokens += num_output_tokens
        if step.outputs.prompt_run:
            self._num_prompt_tokens += step.outputs.num_batched_tokens
        else:
            self._num_decoded_sequences += len(step.outputs.sequences)
        if self._activity_log is not None:
            self._activity_log.count(step.outputs, num_output_tokens, busy_s, self._scheduler)


def report_end(sequence: Sequence) -> RequestOutput:
    return RequestOutput(request_id=sequence.request_id, finish_reason=sequence.finish_reason, is_last=True)


def report_results(
    outputs: SchedulerOutputs, results: StepResults, outcome: StepOutcome
) -> list[RequestOutput]:
    """One output for each sequence that got tokens or ended with this step's results."""
    offsets, counts, rows = (a.tolist() for a in (results.offsets, results.num_appended, outcome.first_rows))
    logprobs = outcome.drawn.logprobs
    reports = [
        RequestOutput(
            request_id=sequence.request_id,
            tokens=new_tokens(
                sequence,
                results.token_ids[start : start + num_new].tolist(),
                [None] * num_new if logprobs is None else logprobs.rows(row, row + num_new),
            ),
            finish_reason=sequence.finish_reason,
            num_cached_tokens=min(sequence.cache.hit_tokens, sequence.num_prompt_tokens),
            prompt_logprobs=take_prompt_logprobs(sequence, sequence.num_output_tokens - num_new),
            is_last=sequence.finish_reason is not None,
        )
        for sequence, start, num_new, row in zip(outputs.sequences, offsets, counts, rows, strict=True)
        if num_new
    ]
    reported = {report.request_id for report in reports}
    reports += [report_end(s) for s in results.finished if s.request_id not in reported]
    return reports


def new_tokens(
    sequence: Sequence, token_ids: list[int], logprobs: list[TokenLogprobs | None]
) -> tuple[OutputToken, ...]:
    """The tokens a step appended to `sequence`, with their output indices."""
    first_index = sequence.num_output_tokens - len(token_ids)
    return tuple(
        OutputToken(index=index, token_id=token_id, logprobs=logprob)
        for index, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True), first_index)
    )
