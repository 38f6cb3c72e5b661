"""The two calls a prompt makes to engines. Closing one before its end is the signal to abort it.

Time-outs are on connecting, on the first byte and on silence in between, never on a whole stream. What a
prompt engine has computed outlives its call: a hand-over that nobody takes is withdrawn by a call of its own.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass

import httpx
import msgspec

from proxy.engine_client import EngineClient
from proxy.engine_connection import ConnectionBroken, NotConnected
from proxy.engine_transport import MAX_ERROR_BYTES
from proxy.engine_waits import EngineWaits
from proxy.errors import (
    EngineBroke,
    EngineFailure,
    EngineUnreachable,
    failure_from_event,
    failure_from_finish,
    refused_at_once,
)
from proxy.event_stream import EventStreamParser, EventStreamTooLong
from proxy.fleet import Engine
from proxy.leg_batch import CompletionLeg, LegBatch, PlainSource, TakeBatch
from proxy.linked_leg import LinkedLeg
from proxy.loads import STREAM_TOKENS, EngineLoads
from proxy.token_batch import TokenBatch
from proxy.token_link import TokenLinks
from wire.json_body import to_json
from wire.services import (
    CompletionEvent,
    CompletionRequest,
    ErrorBody,
    PromptLogprobs,
    PromptRequest,
    PromptResponse,
    ServiceError,
)

logger = logging.getLogger(__name__)

DRAIN_S = 0.05
"""Wait for the end of a stream whose last event is in; its connection can then be used again."""
WITHDRAW_TIMEOUT_S = 2.0
"""A prompt engine that is slower than this frees the blocks when their lease ends."""
_JSON_HEADERS = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class LegTimeouts:
    connect_s: float
    first_byte_s: float
    stall_s: float


class EngineCalls:
    """Opens legs; owns the time-outs, not the connections."""

    def __init__(
        self,
        http: EngineClient,
        timeouts: LegTimeouts,
        waits: EngineWaits,
        loads: EngineLoads,
        answered: Callable[[Engine], None],
        links: TokenLinks | None = None,
    ) -> None:
        """`answered` is to be called when an engine has given its first token of a request.

        `links`: for engines that have token links; without, every stream is a request of its own.
        """
        self._http = http
        self.timeouts = timeouts
        self.waits = waits
        self.loads = loads
        self.answered = answered
        self._links = links
        self._httpx_timeout = httpx.Timeout(None, connect=timeouts.connect_s)
        self._withdrawals: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Wait for the withdrawals that are under way; close all links."""
        if self._links is not None:
            self._links.close()
        await asyncio.gather(*self._withdrawals)

    def check_invariants(self) -> None:
        """Once nothing is open, nobody waits, nothing is counted, no link has a stream."""
        assert self.waits.num_waits == 0
        self.loads.check_invariants()
        if self._links is not None:
            self._links.check_invariants()

    async def prompt(self, engine: Engine, request: PromptRequest) -> PromptResponse:
        """The first token of every choice; cancelling the call aborts the prompt."""
        num_tokens = len(request.prompt_token_ids)
        self.loads.add(engine, num_tokens)
        try:
            posted = await self._http.post_json(
                engine.url + "/v1/prompt",
                to_json(request),
                self.waits.patience(engine, self.timeouts.first_byte_s),
                connect_timeout_s=self.timeouts.connect_s,
            )
        except NotConnected as error:
            raise EngineUnreachable.because(engine.role, str(error), is_slow=error.is_slow) from error
        except ConnectionBroken as error:
            raise _broken(engine, error) from error
        finally:
            self.loads.take_off(engine, num_tokens)
        if posted.head.status != 200:
            headers = {name.decode(): value.decode("latin-1") for name, value in posted.head.headers}
            raise _refusal(engine, posted.head.status, headers, posted.content)
        try:
            answer = _prompt_decoder.decode(posted.content)
        except msgspec.MsgspecError as error:
            raise EngineBroke(engine.role, f"the prompt engine's answer is not valid: {error}") from None
        if len(answer.choices) != request.num_completions:
            asked = request.num_completions
            raise EngineBroke(engine.role, f"{len(answer.choices)} choices came where {asked} were asked for")
        check_prompt_logprobs(engine, request, answer.prompt_logprobs)
        for choice in answer.choices:
            if choice.token.index != request.num_replayed_tokens:
                raise EngineBroke(
                    engine.role,
                    f"a first token has index {choice.token.index} instead of {request.num_replayed_tokens}",
                )
        return answer

    def withdraw(self, engine: Engine, handover_id: str) -> None:
        """Tell a prompt engine that nobody will take this hand-over; returns at once."""
        task = asyncio.create_task(self._withdraw(engine, handover_id))
        self._withdrawals.add(task)
        task.add_done_callback(self._withdrawals.discard)

    async def _withdraw(self, engine: Engine, handover_id: str) -> None:
        try:
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                url = f"{engine.url}/v1/handovers/{handover_id}"
                await self._http.delete(url, timeout=self._httpx_timeout)
        except (httpx.HTTPError, TimeoutError) as error:
            logger.info("hand-over %s is left to its lease: %s", handover_id, _reason(error))

    def completion(
        self, engine: Engine, request: CompletionRequest, timeout_s: float | None
    ) -> AbstractAsyncContextManager[CompletionLeg]:
        """A completion stream, accepted within `timeout_s`; leaving the context before its end aborts it."""
        num_tokens = len(request.prompt_token_ids) + STREAM_TOKENS * request.num_completions
        if self._links is not None and engine.info is not None and engine.info.has_token_link:
            return _LinkedCompletion(self._links, self.loads, engine, request, num_tokens, timeout_s)
        return self._separate_completion(engine, request, num_tokens, timeout_s)

    @asynccontextmanager
    async def _separate_completion(
        self, engine: Engine, request: CompletionRequest, num_tokens: int, timeout_s: float | None
    ) -> AsyncIterator[CompletionLeg]:
        """As a request of its own, over SSE."""
        with self.loads.on(engine, num_tokens):
            async with self._open(engine, "/v1/completion", request, timeout_s) as response:
                leg = EventStreamLeg(engine, response, self.waits)
                try:
                    yield leg
                finally:
                    await leg.close()

    @asynccontextmanager
    async def _open(
        self, engine: Engine, path: str, body: PromptRequest | CompletionRequest, timeout_s: float | None
    ) -> AsyncIterator[httpx.Response]:
        """A response with status 200; anything else is raised as the failure it is."""
        request = self._http.build_request(
            "POST",
            engine.url + path,
            content=to_json(body),
            headers=_JSON_HEADERS,
            timeout=self._httpx_timeout,
        )
        with _translated(engine):
            sending = self._http.send(request, stream=True)
            response = await self.waits.within(timeout_s, engine, sending)
            try:
                if response.status_code != 200:
                    content = await _some_of(response)
                    raise _refusal(engine, response.status_code, response.headers, content)
                yield response
            finally:
                await response.aclose()


@dataclass(slots=True)
class _LinkedCompletion:
    """A context of its own: two generators would take as long as all else that happens here."""

    _links: TokenLinks
    _loads: EngineLoads
    _engine: Engine
    _request: CompletionRequest
    _num_tokens: int
    _timeout_s: float | None
    _leg: LinkedLeg | None = None

    async def __aenter__(self) -> CompletionLeg:
        self._loads.add(self._engine, self._num_tokens)
        try:
            leg = self._leg = await self._links.open(self._engine, self._request)
            await leg.accepted(self._timeout_s)
        except BaseException:
            await self._end()
            raise
        return leg

    async def __aexit__(self, *failure: object) -> None:
        await self._end()

    async def _end(self) -> None:
        self._loads.take_off(self._engine, self._num_tokens)
        if self._leg is not None:
            await self._leg.close()


class EventStreamLeg:
    """A completion leg over SSE: a request of its own, tokens in batches of what arrived together."""

    def __init__(self, engine: Engine, response: httpx.Response, waits: EngineWaits) -> None:
        self._engine = engine
        self._waits = waits
        self._chunks: AsyncGenerator[bytes] = response.aiter_raw()  # type: ignore[assignment]
        self._parser = EventStreamParser()

    async def next_batch(self, timeout_s: float | None) -> LegBatch:
        """At least one token or an end of a choice or of all; silence for `timeout_s` is a failure."""
        while True:
            chunk = await self._waits.within(timeout_s, self._engine, self._read())
            if chunk is None:
                raise EngineBroke(self._engine.role, "the engine's stream ended without a finish reason")
            batch = self._join(self._parser.push(chunk))
            if batch.parts or batch.failure is not None:
                return batch

    async def forward(self, take: TakeBatch, stall_s: float, plain: PlainSource | None = None) -> None:
        while take(await self.next_batch(stall_s)):
            pass

    async def drain(self) -> None:
        """Read the end of a stream whose last batch is in, so that its connection can be kept."""
        try:
            async with asyncio.timeout(DRAIN_S):
                while await self._read() is not None:
                    pass
        except (TimeoutError, httpx.HTTPError):
            pass  # the answer is complete; the connection is simply closed

    async def close(self) -> None:
        await self._chunks.aclose()

    async def _read(self) -> bytes | None:
        return await anext(self._chunks, None)

    def _join(self, frames: Iterable[bytes]) -> LegBatch:
        parts: dict[int, TokenBatch] = {}
        role = self._engine.role
        for frame in frames:
            try:
                event = _event_decoder.decode(frame)
            except msgspec.MsgspecError as error:
                raise EngineBroke(role, f"the engine sent an event that is not valid: {error}") from None
            reason = event.finish_reason
            end = reason if reason == "stop" or reason == "length" else None
            if event.tokens or end is not None:
                batch = TokenBatch(event.tokens, end, event.num_cached_tokens, event.prompt_logprobs)
                before = parts.get(event.choice)
                parts[event.choice] = batch if before is None else before.followed_by(batch)
            if event.error is not None:
                return LegBatch(parts, failure_from_event(role, event.error, event.error_status))
            if reason is not None and end is None:
                return LegBatch(parts, failure_from_finish(role, reason))
        return LegBatch(parts)


def check_prompt_logprobs(
    engine: Engine, request: PromptRequest | CompletionRequest, got: PromptLogprobs | None
) -> None:
    """Every prompt token but the first has some where they were asked for; `EngineBroke` otherwise."""
    num_due = len(request.prompt_token_ids) - 1
    if request.sampling.prompt_logprobs is not None and (got is None or len(got) != num_due):
        num_got = 0 if got is None else len(got)
        raise EngineBroke(
            engine.role, f"the engine answered {num_got} prompt logprobs where {num_due} were due"
        )


@contextmanager
def _translated(engine: Engine) -> Iterator[None]:
    """What httpx raises, as the failure of this engine's leg."""
    role = engine.role
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        is_slow = isinstance(error, httpx.ConnectTimeout)
        raise EngineUnreachable.because(role, _reason(error), is_slow=is_slow) from error
    except (httpx.HTTPError, EventStreamTooLong) as error:
        raise _broken(engine, error) from error


def _broken(engine: Engine, error: Exception) -> EngineBroke:
    return EngineBroke(engine.role, f"the {engine.role} engine's connection failed: {_reason(error)}")


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


async def _some_of(response: httpx.Response) -> bytes:
    """Enough for any error."""
    content = b""
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > MAX_ERROR_BYTES:
            break
    return content


def _refusal(engine: Engine, status: int, given: Mapping[str, str], content: bytes) -> EngineFailure:
    """The engine's own error object where there is one; what is no error at all is a broken protocol."""
    headers = {name: given[name] for name in _PASSED_HEADERS if name in given}
    try:
        error = _error_decoder.decode(content).error
    except msgspec.MsgspecError:
        if status not in _STATUS_WITHOUT_BODY:
            return EngineBroke(engine.role, f"the {engine.role} engine answered status {status} unexpectedly")
        message = f"the {engine.role} engine refused the request with status {status}"
        kind = "rate_limit_error" if status == 429 else "server_error"
        error = ServiceError(message=message, type=kind, code="engine_refused")
    if status < 400:
        return EngineBroke(engine.role, f"the {engine.role} engine answered status {status} unexpectedly")
    return refused_at_once(engine.role, status, error, headers)


_PASSED_HEADERS = ("retry-after", "x-should-retry")
_STATUS_WITHOUT_BODY = frozenset({429, 500, 502, 503, 504})
_prompt_decoder = msgspec.json.Decoder(PromptResponse)
_event_decoder = msgspec.json.Decoder(CompletionEvent)
_error_decoder = msgspec.json.Decoder(ErrorBody)
