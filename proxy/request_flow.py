"""Joins the legs of one prompt into streams of tokens, one for each of its choices.

    1. both legs start at once; the prompt leg computes, the completion leg waits for its KV blocks
    2. the prompt engine answers with token 0 of every choice, which go to their sinks at once; only in the
       first REFUSAL_WINDOW_S of a request they wait for the completion engine's status
    3. the completion engine's tokens follow, from index 1 on
    4. a choice ends with a finish reason, or with a sink that wants no more; when all have ended, what still
       runs is closed, which aborts it

A completion engine that refuses, has no room or dies before its first token leaves the hand-over with the
prompt engine; another one may then take the same hand-over, and nothing is computed twice.

A leg that fails cancels the other at once; cancelling `run_prompt` cancels both. A hand-over that the
completion engine has not taken over by then is withdrawn from the prompt engine.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TypeAlias

import msgspec

from proxy.engine_waits import too_slow
from proxy.errors import EngineFailure, EngineRefused, EngineUnreachable, failure_from_finish
from proxy.fleet import Engine
from proxy.leg_batch import CompletionLeg, LegBatch
from proxy.legs import EngineCalls
from proxy.pairing import Pair, Route, Single
from proxy.relay import Relay
from proxy.text_stream import EndOfText
from proxy.token_batch import TokenBatch, TokenSink
from wire.sampling import SamplingParams
from wire.services import (
    CompletionRequest,
    PromptChoice,
    PromptEngineAddress,
    PromptRequest,
    PromptResponse,
)

REFUSAL_WINDOW_S = 0.02
"""A completion engine that refuses does so within this time of the start; token 0 of a prefill that is even
faster waits, so that the refusal can still be the client's status."""
PROMPT_REASON_WAIT_S = 0.1
"""How long a failed completion leg waits for the prompt engine, which often knows the reason behind it."""


class PromptWork(msgspec.Struct, frozen=True, kw_only=True):
    """What both legs of one prompt are told."""

    request_id: str
    handover_id: str
    prompt_index: int = 0
    """Its place among the prompts of its request."""
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    num_completions: int
    num_replayed_tokens: int = 0
    """The last so many of the ids were generated before, on other engines."""
    cache_salt: str = ""
    priority: int = 0
    routing_key: str = ""
    session: str | None = None
    """Where a policy goes by sessions, those of one go to one engine."""

    @property
    def num_tokens_at_end(self) -> int:
        """Of prompt and completion together, at most."""
        return len(self.prompt_token_ids) - self.num_replayed_tokens + self.sampling.max_tokens

    def of_choice(self, choice: int) -> "PromptWork":
        """One of several choices as a prompt of its own."""
        request_id = f"{self.request_id}-{choice}"
        sampling = self.sampling.of_choice(choice)
        return msgspec.structs.replace(self, request_id=request_id, sampling=sampling, num_completions=1)

    def after(self, token_ids: Sequence[int]) -> "PromptWork":
        """The rest of a completion that has begun with these tokens."""
        return msgspec.structs.replace(
            self,
            prompt_token_ids=(*self.prompt_token_ids, *token_ids),
            sampling=replace(self.sampling, prompt_logprobs=None) if token_ids else self.sampling,
            num_replayed_tokens=len(token_ids),
        )


PassOn: TypeAlias = Callable[[EngineFailure], Engine | None]
"""Who else may take a hand-over that a completion engine has left; None: nobody."""


def _to_nobody(failure: EngineFailure) -> None:
    return None


def run_prompt(
    calls: EngineCalls,
    route: Route,
    work: PromptWork,
    sinks: Sequence[TokenSink],
    pass_on: PassOn = _to_nobody,
) -> Coroutine[None, None, None]:
    """Feed each choice's sink with its tokens, the last batch with its finish reason.

    Raises the `EngineFailure` that ended one of them otherwise, and with it all.
    """
    assert len(sinks) == work.num_completions
    match route:
        case Pair(prompt, completion, lender):
            return _PairFlow(calls, prompt, completion, work, sinks, lender, pass_on).run()
        case Single(normal):
            return _run_single(calls, normal, work, sinks)


async def _run_single(
    calls: EngineCalls, engine: Engine, work: PromptWork, sinks: Sequence[TokenSink]
) -> None:
    body = CompletionRequest(
        request_id=work.request_id,
        prompt_token_ids=work.prompt_token_ids,
        sampling=work.sampling,
        num_completions=work.num_completions,
        num_replayed_tokens=work.num_replayed_tokens,
        cache_salt=work.cache_salt,
        priority=work.priority,
        routing_key=work.routing_key,
    )
    timeouts = calls.timeouts
    async with calls.completion(engine, body, timeouts.first_byte_s) as leg:
        first = await leg.next_batch(timeouts.first_byte_s)
        if first.parts:
            calls.answered(engine)
        wanted = dict(enumerate(sinks))
        relay = Relay(engine, wanted.keys(), wanted, next_index=work.num_replayed_tokens, prefilled=body)
        await relay.run(leg, first, timeouts.stall_s)


class _PairFlow:
    def __init__(
        self,
        calls: EngineCalls,
        prompt: Engine,
        completion: Engine,
        work: PromptWork,
        sinks: Sequence[TokenSink],
        lender: Engine | None,
        pass_on: PassOn,
    ) -> None:
        self._calls = calls
        self._pass_on = pass_on
        self._lender = lender
        self._prompt = prompt
        self._completion = completion
        self._work = work
        self._sinks = sinks
        self._timeouts = calls.timeouts
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()
        self._completion_patience: asyncio.Timeout | None = None
        """Runs from the prompt engine's answer: until then that engine is the one being waited for."""
        self._prompt_answered = asyncio.Event()
        self._prompt_leg_ended = asyncio.Event()
        self._completion_answered: asyncio.Future[None] = self._loop.create_future()
        self._first_tokens_are_out: asyncio.Future[None] = self._loop.create_future()
        self._completion_failure: EngineFailure | None = None
        self._handed_over: tuple[int, ...] = ()
        """Choices that the completion engine serves."""
        self._wanted: dict[int, TokenSink] = {}
        """Of these, the sinks that want more than the first token."""
        self._may_be_held = False
        """The prompt engine may have computed the prompt and wait for a completion engine to take it over."""
        self._is_taken_over = False

    async def run(self) -> None:
        try:
            await self._run_legs()
        finally:
            if self._may_be_held and not self._is_taken_over:
                self._calls.withdraw(self._prompt, self._work.handover_id)

    async def _run_legs(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                await self._run_prompt_leg(group.create_task(self._run_completion_leg()))
        except BaseExceptionGroup as failures:
            # Where both failed at once, the prompt leg's reason comes first: it is the earlier stage.
            raise max(failures.exceptions, key=_precedence) from None

    async def _run_prompt_leg(self, completion_leg: asyncio.Task[None]) -> None:
        try:
            await self._pass_on_first_tokens(completion_leg)
        finally:
            self._prompt_leg_ended.set()

    async def _pass_on_first_tokens(self, completion_leg: asyncio.Task[None]) -> None:
        answer = await self._call_prompt()
        self._calls.answered(self._prompt)
        if self._completion_patience is not None and not self._completion_patience.expired():
            self._completion_patience.reschedule(self._loop.time() + self._timeouts.first_byte_s)
        ends = [self._end_of_text(choice) for choice in answer.choices]
        self._handed_over = tuple(choice for choice, end in enumerate(ends) if end is None)
        self._may_be_held = bool(self._handed_over)
        if self._handed_over:
            await self._wait_for_early_refusal()
            if self._completion_failure is not None:
                return  # the completion leg raises it
        for choice, (first, end) in enumerate(zip(answer.choices, ends, strict=True)):
            batch = TokenBatch((first.token,), end, answer.num_cached_tokens, answer.prompt_logprobs)
            wants_more = self._sinks[choice].accept(batch)
            if wants_more and end is None:
                self._wanted[choice] = self._sinks[choice]
        if self._wanted:
            _tell(self._first_tokens_are_out)
        else:
            completion_leg.cancel()

    async def _call_prompt(self) -> PromptResponse:
        work = self._work
        body = PromptRequest(
            request_id=work.request_id,
            handover_id=work.handover_id,
            prompt_token_ids=work.prompt_token_ids,
            sampling=work.sampling,
            num_completions=work.num_completions,
            num_replayed_tokens=work.num_replayed_tokens,
            cache_salt=work.cache_salt,
            priority=work.priority,
            routing_key=work.routing_key,
            previous_engine=None if self._lender is None else _address_of(self._lender),
        )
        self._may_be_held = True
        try:
            return await self._calls.prompt(self._prompt, body)
        except (EngineRefused, EngineUnreachable):
            self._may_be_held = False
            raise
        finally:
            self._prompt_answered.set()

    def _end_of_text(self, choice: PromptChoice) -> EndOfText | None:
        reason = choice.finish_reason
        if reason is None or reason == "stop" or reason == "length":
            return reason
        raise failure_from_finish(self._prompt.role, reason)

    async def _wait_for_early_refusal(self) -> None:
        if self._completion_answered.done():
            return
        window = self._loop.call_at(self._started_s + REFUSAL_WINDOW_S, _tell, self._completion_answered)
        try:
            await self._completion_answered
        finally:
            window.cancel()

    async def _run_completion_leg(self) -> None:
        while True:
            try:
                await self._follow_completion()
                return
            except EngineFailure as failure:
                another = self._another_taker(failure)
                if another is None:
                    self._completion_failure = failure
                    _tell(self._completion_answered)
                    await self._let_prompt_leg_explain(failure)
                    raise
                self._completion = another

    def _another_taker(self, failure: EngineFailure) -> Engine | None:
        is_left = failure.leaves_handover and not self._is_taken_over
        return self._pass_on(failure) if is_left else None

    async def _follow_completion(self) -> None:
        """From the request to the end of its stream."""
        patience_s = self._timeouts.first_byte_s if self._prompt_answered.is_set() else None
        patience = self._completion_patience = asyncio.timeout(patience_s)
        try:
            async with (
                patience,
                self._calls.completion(self._completion, self._completion_request(), None) as leg,
            ):
                _tell(self._completion_answered)
                # The first tokens, which cannot come before the prompt is computed.
                first = await leg.next_batch(None)
                self._completion_patience = None
                patience.reschedule(None)
                await self._relay(leg, first)
        except TimeoutError:
            raise too_slow(self._completion, self._timeouts.first_byte_s) from None
        finally:
            self._completion_patience = None

    async def _relay(self, leg: CompletionLeg, first: LegBatch) -> None:
        if first.failure is not None and not first.parts:
            raise first.failure
        self._is_taken_over = True
        self._calls.answered(self._completion)
        await self._first_tokens_are_out
        next_index = self._work.num_replayed_tokens + 1
        relay = Relay(self._completion, self._handed_over, self._wanted, next_index=next_index)
        await relay.run(leg, first, self._timeouts.stall_s)

    async def _let_prompt_leg_explain(self, failure: EngineFailure) -> None:
        """Where the hand-over failed: the prompt leg, if it ends the request in time, cancels the caller."""
        if self._first_tokens_are_out.done():
            return
        if not failure.is_of_handover:
            return
        # A withdrawn hand-over is never the reason itself: the prompt leg has ended, or is about to.
        is_withdrawn = failure.error.code == "handover_withdrawn"
        try:
            async with asyncio.timeout(None if is_withdrawn else PROMPT_REASON_WAIT_S):
                await self._prompt_answered.wait()
        except TimeoutError:
            return
        await self._prompt_leg_ended.wait()

    def _completion_request(self) -> CompletionRequest:
        return CompletionRequest(
            request_id=self._work.request_id,
            prompt_token_ids=self._work.prompt_token_ids,
            sampling=self._work.sampling,
            num_completions=self._work.num_completions,
            num_replayed_tokens=self._work.num_replayed_tokens,
            cache_salt=self._work.cache_salt,
            priority=self._work.priority,
            routing_key=self._work.routing_key,
            handover_id=self._work.handover_id,
            prompt_engine=_address_of(self._prompt),
        )


def _tell(awaited: asyncio.Future[None]) -> None:
    if not awaited.done():
        awaited.set_result(None)


def _address_of(engine: Engine) -> PromptEngineAddress:
    """Where other engines find the KV blocks of this one."""
    info = engine.info
    assert info is not None
    assert info.control_address is not None
    return PromptEngineAddress(
        engine_id=info.engine_id, epoch=info.epoch, control_address=info.control_address
    )


def _precedence(failure: BaseException) -> int:
    if isinstance(failure, EngineFailure):
        return 1 if failure.role == "prompt" else 0
    return 2  # a mistake of ours must not hide behind an engine's
