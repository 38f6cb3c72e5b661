"""The service's end of a token link: the streams of one proxy over one connection (`wire.token_link`).

1. a link is opened; its frames are read and written until either side closes it
2. each OpenStream is checked as a request of its own and goes to the engine, or is refused in its own stream
3. whatever a step brings for any of its streams leaves as one frame; where the proxy reads slowly, what
   begins a stream leaves before the tokens of others
4. a service that begins to drain says so at once, so that streams can be moved in time
5. when it closes, what is still open is aborted; a draining service closes it once its streams have ended
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

import msgspec
from starlette.types import Receive, Scope, Send

from engine.ipc import AddRequest, RequestOutput
from engine.serving.engine_link import EngineLink
from engine.serving.errors import EngineRefused, EngineUnavailable, InvalidRequest, ServiceFailure
from engine.serving.http_protocol import HOLD_LITTLE
from engine.serving.metrics import ServiceMetrics
from engine.serving.supervisor import EngineSupervisor
from wire.services import CompletionRequest
from wire.token_link import (
    BEAT_S,
    LINK,
    CloseStream,
    FrameSplitter,
    FrameTooLong,
    OpenStream,
    StreamPart,
    decode_to_service,
    frame,
)

logger = logging.getLogger(__name__)

MAX_PENDING_PARTS = 1 << 18
"""Ten seconds of 256 streams at 100 tokens per second. A proxy that has read nothing for so long is given up;
its streams are aborted."""
MAX_FRAME_PARTS = 1024
"""What begins a stream does not overtake a frame that is being sent."""

Check = Callable[[CompletionRequest], tuple[EngineLink, AddRequest]]


class TokenLinkEndpoint:
    """The ASGI application behind LINK_PATH; one session per connection."""

    def __init__(
        self,
        check: Check,
        metrics: ServiceMetrics,
        supervisor: EngineSupervisor,
        *,
        with_cached_tokens: bool,
    ) -> None:
        """`check` raises `ServiceFailure` for a request that this engine does not take now."""
        self._check = check
        self._metrics = metrics
        self._supervisor = supervisor
        self._with_cached_tokens = with_cached_tokens
        self._sessions: set[LinkSession] = set()
        supervisor.on_drain = self._say_that_it_leaves

    def _say_that_it_leaves(self) -> None:
        for session in self._sessions:
            session.say_that_it_leaves(self._supervisor.grace_left_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = LinkSession(self._check, self._metrics, with_cached_tokens=self._with_cached_tokens)
        self._sessions.add(session)
        if self._supervisor.state == "draining":
            session.say_that_it_leaves(self._supervisor.grace_left_s)
        hold_little = scope.get("extensions", {}).get(HOLD_LITTLE)
        if hold_little is not None:
            hold_little()
        try:
            await self._serve(session, receive, send)
        finally:
            self._sessions.discard(session)

    async def _serve(self, session: "LinkSession", receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"cache-control", b"no-store")]}
        )
        reading = asyncio.create_task(_read(receive, session))
        writing = asyncio.create_task(self._write(send, session))
        overflowing = asyncio.create_task(session.is_overfull.wait())
        try:
            await asyncio.wait((reading, writing, overflowing), return_when=asyncio.FIRST_COMPLETED)
            for task in (reading, writing):
                if task.done():
                    task.result()
        finally:
            session.close()
            reading.cancel()
            writing.cancel()
            overflowing.cancel()
            await asyncio.gather(reading, writing, overflowing, return_exceptions=True)

    async def _write(self, send: Send, session: "LinkSession") -> None:
        is_over = False
        while not is_over:
            parts = await session.next_parts()
            is_over = self._supervisor.state == "draining" and session.is_done
            await send({"type": "http.response.body", "body": frame(parts), "more_body": not is_over})


async def _read(receive: Receive, session: "LinkSession") -> None:
    """Until the proxy closes, or sends what is no frame."""
    splitter = FrameSplitter()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return
        try:
            for data in splitter.push(message.get("body", b"")):
                session.take(data)
        except (FrameTooLong, msgspec.MsgspecError):
            return
        if not message.get("more_body", False):
            return


class LinkSession:
    """The open streams of one link, and what is to be sent to them."""

    def __init__(self, check: Check, metrics: ServiceMetrics, *, with_cached_tokens: bool) -> None:
        self._check = check
        self.metrics = metrics
        self.with_cached_tokens = with_cached_tokens
        self._streams: dict[int, LinkedStream] = {}
        self._beginnings: list[StreamPart] = []
        """What stands first in its stream, or is about the link itself."""
        self._pending: deque[StreamPart] = deque()
        self._has_parts = asyncio.Event()
        self.is_overfull = asyncio.Event()
        """The proxy does not read."""

    @property
    def is_done(self) -> bool:
        """No stream is open, and everything about them has been taken."""
        return not (self._streams or self._beginnings or self._pending)

    def take(self, data: bytes) -> None:
        """One frame of the proxy's; raises `msgspec.MsgspecError` where it is none."""
        match decode_to_service(data):
            case OpenStream(number, request):
                self._open(number, request)
            case CloseStream(number):
                self.end(number)

    def begin(self, part: StreamPart) -> None:
        """Send what a stream has nothing before: it waits for no other stream's tokens."""
        self._add(part, self._beginnings)

    def send(self, part: StreamPart) -> None:
        """With everything else that this turn of the event loop brings."""
        self._add(part, self._pending)

    def say_that_it_leaves(self, grace_left_s: float) -> None:
        self._beginnings.insert(0, StreamPart(LINK, leaves_in_s=grace_left_s))
        self._has_parts.set()

    def end(self, number: int) -> None:
        """Forget a stream; a request that has not ended is aborted."""
        stream = self._streams.pop(number, None)
        if stream is not None:
            stream.close()

    async def next_parts(self) -> list[StreamPart]:
        """The next frame: what has come since the last call, as far as it has room; nothing after BEAT_S."""
        try:
            async with asyncio.timeout(BEAT_S):
                await self._has_parts.wait()
        except TimeoutError:
            pass
        parts, self._beginnings = self._beginnings, []
        while self._pending and len(parts) < MAX_FRAME_PARTS:
            parts.append(self._pending.popleft())
        if not self._pending:
            self._has_parts.clear()
        return parts

    def close(self) -> None:
        for number in list(self._streams):
            self.end(number)

    def _add(self, part: StreamPart, waiting: list[StreamPart] | deque[StreamPart]) -> None:
        num_parts = len(self._beginnings) + len(self._pending)
        if num_parts >= MAX_PENDING_PARTS:
            if not self.is_overfull.is_set():
                logger.warning("a proxy has not read %d parts: its link is given up", num_parts)
                self.is_overfull.set()
            return
        waiting.append(part)
        self._has_parts.set()

    def _open(self, number: int, raw: msgspec.Raw) -> None:
        try:
            link, request = self._check(_decode_request(raw))
            stream = LinkedStream(self, number, link, request.request_id)
            link.open(request, stream)
        except ServiceFailure as failure:
            self.begin(StreamPart(number, error=failure.error, error_status=failure.status))
        else:
            self._streams[number] = stream
            self.begin(StreamPart(number, is_accepted=True))


class LinkedStream:
    """Receives the outputs of one request for its session."""

    def __init__(self, session: LinkSession, number: int, link: EngineLink, request_id: str) -> None:
        self.has_ended = False
        self._session = session
        self._number = number
        self._link = link
        self._request_id = request_id
        self._started_s = time.monotonic()
        self._is_first = True
        self._outcome = "abort"

    def put(self, item: RequestOutput | EngineUnavailable) -> None:
        if isinstance(item, EngineUnavailable):
            self._fail(item)
        elif item.failure is not None:
            self._fail(EngineRefused(item.failure.status, item.failure.error))
        else:
            self._pass_on(item)

    def close(self) -> None:
        """The proxy of a link passes the hand-over on, or tells the prompt engine that nobody takes it."""
        self._link.close_request(self._request_id, keeps_handover=True)
        self._session.metrics.count_request(self._outcome)

    def _pass_on(self, output: RequestOutput) -> None:
        if self._is_first:
            self._is_first = False
            self._session.metrics.observe_first_token(time.monotonic() - self._started_s)
            self._session.begin(self._part(output))
        else:
            self._session.send(self._part(output))
        if output.is_last:
            self._outcome = output.finish_reason or self._outcome
            self.has_ended = True
            self._session.end(self._number)

    def _part(self, output: RequestOutput) -> StreamPart:
        tokens = output.tokens
        logprobs = tuple(token.logprobs for token in tokens)
        return StreamPart(
            self._number,
            choice=output.choice,
            first_index=tokens[0].index if tokens else 0,
            token_ids=tuple(token.token_id for token in tokens),
            finish_reason=output.finish_reason,
            num_cached_tokens=output.num_cached_tokens if self._session.with_cached_tokens else None,
            logprobs=logprobs if any(logprobs) else None,
            prompt_logprobs=output.prompt_logprobs,
        )

    def _fail(self, failure: ServiceFailure) -> None:
        self._outcome = "error"
        self.has_ended = True
        send = self._session.begin if self._is_first else self._session.send
        send(StreamPart(self._number, error=failure.error, error_status=failure.status))
        self._session.end(self._number)


def _decode_request(raw: msgspec.Raw) -> CompletionRequest:
    try:
        return _request_decoder.decode(raw)
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidRequest(f"the request is not valid: {error}") from None


_request_decoder = msgspec.msgpack.Decoder(CompletionRequest)
