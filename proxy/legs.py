"""The two calls a request makes to engines. Closing one before its end is the signal to abort it.

Time-outs are on connecting, on the first byte and on silence in between, never on a whole stream.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import httpx
import msgspec

from proxy.engines import Engine
from proxy.errors import (
    EngineBroke,
    EngineFailure,
    EngineRefused,
    EngineTooSlow,
    EngineUnreachable,
    failure_from_event,
    failure_from_finish,
)
from proxy.event_stream import EventStreamParser, EventStreamTooLong
from proxy.text_stream import EndOfText
from wire.json_body import to_json
from wire.services import (
    CompletionEvent,
    CompletionRequest,
    ErrorBody,
    OutputToken,
    PromptRequest,
    PromptResponse,
    ServiceError,
)

ResultT = TypeVar("ResultT")

DRAIN_S = 0.05
"""Wait for the end of a stream whose last event is in; its connection can then be used again."""
MAX_ERROR_BYTES = 1 << 16
_JSON_HEADERS = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class LegTimeouts:
    connect_s: float
    first_byte_s: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class LegBatch:
    """The events of one read, joined."""

    tokens: tuple[OutputToken, ...] = ()
    finish_reason: EndOfText | None = None
    num_cached_tokens: int | None = None
    failure: EngineFailure | None = None
    """Why the stream ends after these tokens without an answer."""

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.failure is not None


class EngineCalls:
    """Opens legs; owns the time-outs, not the connections."""

    def __init__(self, http: httpx.AsyncClient, timeouts: LegTimeouts) -> None:
        self._http = http
        self.timeouts = timeouts
        self._httpx_timeout = httpx.Timeout(None, connect=timeouts.connect_s)

    async def prompt(self, engine: Engine, request: PromptRequest) -> PromptResponse:
        """The first token; cancelling the call aborts the prompt."""
        timeout_s = self.timeouts.first_byte_s
        async with self._open(engine, "/v1/prompt", request, timeout_s) as response:
            content = await _within(timeout_s, engine, response.aread())
        try:
            answer = _prompt_decoder.decode(content)
        except msgspec.MsgspecError as error:
            raise EngineBroke(engine.role, f"the prompt engine's answer is not valid: {error}") from None
        if answer.token.index != 0:
            raise EngineBroke(engine.role, f"the first token has index {answer.token.index} instead of 0")
        return answer

    @asynccontextmanager
    async def completion(
        self, engine: Engine, request: CompletionRequest, timeout_s: float | None
    ) -> AsyncIterator["CompletionLeg"]:
        """A completion stream, accepted within `timeout_s`; leaving the context before its end aborts it."""
        async with self._open(engine, "/v1/completion", request, timeout_s) as response:
            leg = CompletionLeg(engine, response)
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
            response = await _within(timeout_s, engine, sending)
            try:
                if response.status_code != 200:
                    raise await _refusal(engine, response)
                yield response
            finally:
                await response.aclose()


class CompletionLeg:
    """The tokens of one completion stream, in batches of what arrived together."""

    def __init__(self, engine: Engine, response: httpx.Response) -> None:
        self._engine = engine
        self._chunks: AsyncGenerator[bytes] = response.aiter_raw()  # type: ignore[assignment]
        self._parser = EventStreamParser()
        self._has_ended = False

    async def next_batch(self, timeout_s: float | None) -> LegBatch:
        """At least one token or an end; silence for `timeout_s` is a failure."""
        assert not self._has_ended
        while True:
            chunk = await _within(timeout_s, self._engine, self._read())
            if chunk is None:
                raise EngineBroke(self._engine.role, "the engine's stream ended without a finish reason")
            batch = self._join(self._parser.push(chunk))
            if batch.tokens or batch.is_last:
                self._has_ended = batch.is_last
                return batch

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
        tokens: list[OutputToken] = []
        role = self._engine.role
        num_cached_tokens: int | None = None
        for frame in frames:
            try:
                event = _event_decoder.decode(frame)
            except msgspec.MsgspecError as error:
                raise EngineBroke(role, f"the engine sent an event that is not valid: {error}") from None
            tokens += event.tokens
            if event.num_cached_tokens is not None:
                num_cached_tokens = event.num_cached_tokens
            if event.error is not None:
                failure: EngineFailure = failure_from_event(role, event.error, event.error_status)
                return LegBatch(tuple(tokens), None, num_cached_tokens, failure)
            if event.finish_reason == "stop" or event.finish_reason == "length":
                return LegBatch(tuple(tokens), event.finish_reason, num_cached_tokens)
            if event.finish_reason is not None:
                failure = failure_from_finish(role, event.finish_reason)
                return LegBatch(tuple(tokens), None, num_cached_tokens, failure)
        return LegBatch(tuple(tokens), None, num_cached_tokens)


async def _within(timeout_s: float | None, engine: Engine, work: Awaitable[ResultT]) -> ResultT:
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError:
        raise too_slow(engine, timeout_s) from None


def too_slow(engine: Engine, timeout_s: float | None) -> EngineTooSlow:
    return EngineTooSlow(engine.role, f"the {engine.role} engine said nothing for {timeout_s:g} s")


@contextmanager
def _translated(engine: Engine) -> Iterator[None]:
    """What httpx raises, as the failure of this engine's leg."""
    role = engine.role
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise EngineUnreachable(role, f"the {role} engine cannot be reached: {_reason(error)}") from error
    except (httpx.HTTPError, EventStreamTooLong) as error:
        raise EngineBroke(role, f"the {role} engine's connection failed: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


async def _refusal(engine: Engine, response: httpx.Response) -> EngineFailure:
    """The engine's own error object where there is one; what is no error at all is a broken protocol."""
    status = response.status_code
    content = b""
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > MAX_ERROR_BYTES:
            break
    headers = {name: response.headers[name] for name in _PASSED_HEADERS if name in response.headers}
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
    return EngineRefused(engine.role, status, error, headers)


_PASSED_HEADERS = ("retry-after", "x-should-retry")
_STATUS_WITHOUT_BODY = frozenset({429, 500, 502, 503, 504})
_prompt_decoder = msgspec.json.Decoder(PromptResponse)
_event_decoder = msgspec.json.Decoder(CompletionEvent)
_error_decoder = msgspec.json.Decoder(ErrorBody)
