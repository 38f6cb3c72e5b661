"""Joins the legs of one choice into one stream of tokens.

    1. both legs start at once; the prompt leg computes, the completion leg waits for its KV blocks
    2. the prompt engine answers with token 0, which goes to the sink at once; only in the first
       REFUSAL_WINDOW_S of a request it waits for the completion engine's status
    3. the completion engine's tokens follow, from index 1 on
    4. the end: a finish reason, or a sink that wants no more; what still runs is closed, which aborts it

A leg that fails cancels the other at once; cancelling `run` cancels both.
"""

import asyncio
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

from proxy.engines import Engine
from proxy.errors import EngineBroke, EngineFailure, failure_from_finish
from proxy.legs import CompletionLeg, EngineCalls, LegBatch, too_slow
from proxy.pairing import Pair, Route, Single
from proxy.text_stream import EndOfText
from proxy.token_batch import TokenBatch, TokenSink
from wire.sampling import SamplingParams
from wire.services import (
    CompletionRequest,
    OutputToken,
    PromptEngineAddress,
    PromptRequest,
    PromptResponse,
)

REFUSAL_WINDOW_S = 0.02
"""A completion engine that refuses does so within this time of the start; token 0 of a prefill that is even
faster waits, so that the refusal can still be the client's status."""
PROMPT_REASON_WAIT_S = 0.1
"""How long a failed completion leg waits for the prompt engine, which often knows the reason behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRequest:
    """What both legs of one choice are told."""

    request_id: str
    handover_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams


async def run_choice(calls: EngineCalls, route: Route, request: ChoiceRequest, sink: TokenSink) -> None:
    """Feed `sink` with the tokens of one choice, the last batch with its finish reason.

    Raises the `EngineFailure` that ended it otherwise.
    """
    match route:
        case Pair(prompt, completion):
            await _PairFlow(calls, prompt, completion, request, sink).run()
        case Single(normal):
            await _run_single(calls, normal, request, sink)


async def _run_single(calls: EngineCalls, engine: Engine, request: ChoiceRequest, sink: TokenSink) -> None:
    body = CompletionRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
    )
    timeouts = calls.timeouts
    async with calls.completion(engine, body, timeouts.first_byte_s) as leg:
        first = await leg.next_batch(timeouts.first_byte_s)
        await _relay(engine, leg, first, sink, next_index=0, stall_s=timeouts.stall_s)


class _PairFlow:
    def __init__(
        self,
        calls: EngineCalls,
        prompt: Engine,
        completion: Engine,
        request: ChoiceRequest,
        sink: TokenSink,
    ) -> None:
        self._calls = calls
        self._prompt = prompt
        self._completion = completion
        self._request = request
        self._sink = sink
        self._timeouts = calls.timeouts
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()
        self._completion_patience: asyncio.Timeout | None = None
        """Runs from the prompt engine's answer: until then that engine is the one being waited for."""
        self._prompt_answered = asyncio.Event()
        self._prompt_leg_ended = asyncio.Event()
        self._completion_answered = asyncio.Event()
        self._first_token_is_out = asyncio.Event()
        self._completion_failure: EngineFailure | None = None

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                completion_leg = group.create_task(self._run_completion_leg())
                group.create_task(self._run_prompt_leg(completion_leg))
        except BaseExceptionGroup as failures:
            # Where both failed at once, the prompt leg's reason comes first: it is the earlier stage.
            raise max(failures.exceptions, key=_precedence) from None

    async def _run_prompt_leg(self, completion_leg: asyncio.Task[None]) -> None:
        try:
            await self._pass_on_first_token(completion_leg)
        finally:
            self._prompt_leg_ended.set()

    async def _pass_on_first_token(self, completion_leg: asyncio.Task[None]) -> None:
        answer = await self._call_prompt()
        if self._completion_patience is not None:
            self._completion_patience.reschedule(self._loop.time() + self._timeouts.first_byte_s)
        finish_reason = self._end_of_text(answer)
        if finish_reason is None:
            await self._wait_for_early_refusal()
            if self._completion_failure is not None:
                return  # the completion leg raises it
        batch = TokenBatch((answer.token,), finish_reason, answer.num_cached_tokens)
        wants_more = await self._sink.accept(batch)
        if finish_reason is not None or not wants_more:
            completion_leg.cancel()
        else:
            self._first_token_is_out.set()

    async def _call_prompt(self) -> PromptResponse:
        request = self._request
        body = PromptRequest(
            request_id=request.request_id,
            handover_id=request.handover_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
        )
        try:
            return await self._calls.prompt(self._prompt, body)
        finally:
            self._prompt_answered.set()

    def _end_of_text(self, answer: PromptResponse) -> EndOfText | None:
        reason = answer.finish_reason
        if reason is None or reason == "stop" or reason == "length":
            return reason
        raise failure_from_finish(self._prompt.role, reason)

    async def _wait_for_early_refusal(self) -> None:
        if not self._completion_answered.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._started_s + REFUSAL_WINDOW_S):
                    await self._completion_answered.wait()

    async def _run_completion_leg(self) -> None:
        try:
            async with AsyncExitStack() as until_end:
                leg, first = await self._open_completion_leg(until_end)
                if first.failure is not None and not first.tokens:
                    raise first.failure
                await self._first_token_is_out.wait()
                stall_s = self._timeouts.stall_s
                await _relay(self._completion, leg, first, self._sink, next_index=1, stall_s=stall_s)
        except EngineFailure as failure:
            self._completion_failure = failure
            self._completion_answered.set()
            await self._let_prompt_leg_explain(failure)
            raise

    async def _open_completion_leg(self, until_end: AsyncExitStack) -> tuple[CompletionLeg, LegBatch]:
        """The leg and its first tokens, which cannot come before the prompt is computed."""
        try:
            async with asyncio.timeout(None) as self._completion_patience:
                leg = await until_end.enter_async_context(
                    self._calls.completion(self._completion, self._completion_request(), None)
                )
                self._completion_answered.set()
                return leg, await leg.next_batch(None)
        except TimeoutError:
            raise too_slow(self._completion, self._timeouts.first_byte_s) from None
        finally:
            self._completion_patience = None

    async def _let_prompt_leg_explain(self, failure: EngineFailure) -> None:
        """Where the hand-over failed: the prompt leg, if it ends the request in time, cancels the caller."""
        if self._first_token_is_out.is_set():
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
        info = self._prompt.info
        assert info is not None
        assert info.control_address is not None
        return CompletionRequest(
            request_id=self._request.request_id,
            prompt_token_ids=self._request.prompt_token_ids,
            sampling=self._request.sampling,
            handover_id=self._request.handover_id,
            prompt_engine=PromptEngineAddress(
                engine_id=info.engine_id, epoch=info.epoch, control_address=info.control_address
            ),
        )


def _precedence(failure: BaseException) -> int:
    if isinstance(failure, EngineFailure):
        return 1 if failure.role == "prompt" else 0
    return 2  # a mistake of ours must not hide behind an engine's


async def _relay(
    engine: Engine, leg: CompletionLeg, first: LegBatch, sink: TokenSink, *, next_index: int, stall_s: float
) -> None:
    """Pass on the leg's tokens in order of index until it ends or the sink wants no more."""
    batch = first
    while True:
        tokens = _in_order(engine, batch.tokens, next_index)
        next_index += len(tokens)
        wants_more = True
        if tokens or batch.finish_reason is not None:
            wants_more = await sink.accept(TokenBatch(tokens, batch.finish_reason, batch.num_cached_tokens))
        if batch.finish_reason is not None:
            await leg.drain()
            return
        if not wants_more:
            return
        if batch.failure is not None:
            raise batch.failure
        batch = await leg.next_batch(stall_s)


def _in_order(engine: Engine, tokens: tuple[OutputToken, ...], next_index: int) -> tuple[OutputToken, ...]:
    """The tokens that were not seen yet; a gap means the engine lost some."""
    fresh: list[OutputToken] = []
    for token in tokens:
        if token.index < next_index + len(fresh):
            continue
        if token.index > next_index + len(fresh):
            raise EngineBroke(
                engine.role,
                f"the engine sent token {token.index} where token {next_index + len(fresh)} was due",
            )
        fresh.append(token)
    return tuple(fresh)
