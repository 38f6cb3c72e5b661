"""The proxy's end of token links: one connection per completion engine for all its streams.

Tokens are passed on in the very turn of the event loop that brings them: one frame a step, and no task of a
stream has to wake up for it (`wire.token_link` has the protocol). What takes longer than TURN_S goes on in
the next turn, and nothing is read meanwhile. A link that breaks, or is silent for SILENT_S, fails all its
streams.
"""

import asyncio
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import cast
from urllib.parse import urlsplit

import msgspec

from proxy.connecting import connect
from proxy.engine_waits import EngineWaits
from proxy.errors import EngineBroke, EngineUnreachable
from proxy.fleet import Engine
from proxy.leg_batch import LegBatch
from proxy.linked_leg import LinkedLeg, batch_of
from proxy.native.loading import IS_COMPILED, PlainStreams
from proxy.response_parser import MalformedResponse, ResponseParser
from settings.secret_keys import SecretKeys
from wire.services import CompletionRequest
from wire.token_link import (
    BEAT_S,
    LINK,
    LINK_PATH,
    CloseStream,
    FrameSplitter,
    FrameTooLong,
    StreamPart,
    decode_to_proxy,
    frame,
    open_stream_frame,
)

OnGaps = Callable[[Sequence[float], float], None]
"""Told of tokens that plain streams got: how long each was waited for, and the moment."""

SILENT_S = 10 * BEAT_S
TURN_S = 0.01
"""For so long tokens are passed on at once: an engine that is faster than the proxy must not keep everybody
else from their turns, nor fill the backlogs of clients before anything is sent to them."""
RECEIVE_BUFFER_BYTES = 1 << 16
"""The first token of a new stream waits behind all that is in the socket: 6 MB and more without. With a
quarter of this TCP itself waits on loopback (`wire.link_sending`)."""


class TokenLinks:
    """Opens a link to an engine when its first stream needs one."""

    def __init__(
        self,
        waits: EngineWaits,
        service_token: SecretKeys,
        *,
        connect_timeout_s: float,
        on_leaving: Callable[[str, float], None] = lambda url, leaves_in_s: None,
        on_gaps: OnGaps = lambda gaps_s, now_s: None,
    ) -> None:
        """`on_leaving` is called when the engine at a URL says that it drains."""
        self._on_leaving = on_leaving
        self._on_gaps = on_gaps
        self._waits = waits
        self._service_token = service_token
        self._connect_timeout_s = connect_timeout_s
        self._links: dict[str, TokenLink] = {}
        self._connecting: dict[str, asyncio.Task[TokenLink]] = {}

    async def open(self, engine: Engine, request: CompletionRequest) -> LinkedLeg:
        """A stream that the engine has been asked for; raises `EngineUnreachable`."""
        link = self._links.get(engine.url)
        if link is None or link.is_closed:
            link = await self._new_link(engine)
        return link.open(engine, request, self._waits)

    def close(self) -> None:
        for connecting in self._connecting.values():
            connecting.cancel()
        for link in self._links.values():
            link.close("the proxy is shutting down")

    def check_invariants(self) -> None:
        """Once nothing is open, no link knows of a stream."""
        assert not any(link.num_streams for link in self._links.values())

    async def _new_link(self, engine: Engine) -> "TokenLink":
        """All who need a new link wait for the same attempt, and fail with it."""
        try:
            async with self._waits.on(engine, None):
                link = await asyncio.shield(self._attempt(engine.url))
            if link.is_closed:
                raise ConnectionError("the connection was closed at once")
        except (OSError, TimeoutError) as error:
            reason, is_slow = str(error) or "timed out", isinstance(error, TimeoutError)
            raise EngineUnreachable.because(engine.role, reason, is_slow=is_slow) from error
        return link

    def _attempt(self, url: str) -> "asyncio.Task[TokenLink]":
        attempt = self._connecting.get(url)
        if attempt is None:
            attempt = self._connecting[url] = asyncio.create_task(self._connect(url))
            attempt.add_done_callback(partial(self._connected, url))
        return attempt

    def _connected(self, url: str, attempt: "asyncio.Task[TokenLink]") -> None:
        del self._connecting[url]
        if not attempt.cancelled() and attempt.exception() is None:
            # Engines come and go, and their addresses with them.
            self._links = {other: link for other, link in self._links.items() if not link.is_closed}
            self._links[url] = attempt.result()

    async def _connect(self, url: str) -> "TokenLink":
        address = urlsplit(url)
        is_tls = address.scheme == "https"
        async with asyncio.timeout(self._connect_timeout_s):
            return await connect(
                lambda: TokenLink(self._head(address.netloc), partial(self._on_leaving, url), self._on_gaps),
                address.hostname or "",
                address.port or (443 if is_tls else 80),
                is_tls=is_tls,
            )

    def _head(self, host: str) -> bytes:
        lines = [f"POST {LINK_PATH} HTTP/1.1", f"host: {host}", "transfer-encoding: chunked"]
        if self._service_token.is_required:
            lines.append(f"authorization: Bearer {self._service_token.first()}")
        return "\r\n".join([*lines, "", ""]).encode()


class TokenLink(asyncio.Protocol):
    """One connection; numbers its streams."""

    def __init__(
        self, head: bytes, on_leaving: Callable[[float], None], on_gaps: OnGaps = lambda gaps_s, now_s: None
    ) -> None:
        self._head = head
        self._on_leaving = on_leaving
        self._on_gaps = on_gaps
        self._plain = PlainStreams() if IS_COMPILED else None
        """Streams whose tokens are taken without Python; see `proxy.native`."""
        self._may_become_plain: list[LinkedLeg] = []
        """They have just got something."""
        self._parser = ResponseParser()
        self._splitter = FrameSplitter()
        self._parts: deque[StreamPart] = deque()
        """Read, and not passed on yet."""
        self._is_paused = False
        """Nothing is read before all of these are passed on, in turns to come."""
        self._legs: dict[int, LinkedLeg] = {}
        self._unsent: list[bytes] = []
        self._numbers = count(1)
        self._transport: asyncio.Transport | None = None
        self._heard_s = 0.0
        self._was_silent = False
        self._watch: asyncio.TimerHandle | None = None
        self.is_closed = False

    @property
    def num_streams(self) -> int:
        return len(self._legs)

    def open(self, engine: Engine, request: CompletionRequest, waits: EngineWaits) -> LinkedLeg:
        number = next(self._numbers)
        leave = partial(self._leave, number)
        leg = self._legs[number] = LinkedLeg(engine, waits, leave, number, self._plain)
        self._write(open_stream_frame(number, request))
        return leg

    def close(self, reason: str) -> None:
        """Fails every open stream."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._watch is not None:
            self._watch.cancel()
        if self._transport is not None:
            self._transport.abort()
        for leg in list(self._legs.values()):
            failure = EngineBroke(leg.engine.role, f"the engine's link failed: {reason}")
            leg.take(LegBatch(failure=failure), self._heard_s)
        self._legs.clear()

    def _leave(self, number: int, is_over: bool) -> None:
        """Forget a stream; the engine need not be told when it has told the end itself."""
        if self._legs.pop(number, None) is not None and not is_over:
            self._write(frame(CloseStream(number)))

    def _write(self, data: bytes) -> None:
        """With all else that this turn has to say: each write is a call of the kernel."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent.append(b"%x\r\n%b\r\n" % (len(data), data))

    def _send(self) -> None:
        data = b"".join(self._unsent)
        self._unsent.clear()
        if not self.is_closed:
            assert self._transport is not None
            self._transport.write(data)

    def _pass_on(self, for_s: float) -> None:
        """What has been read; the rest of it in the next turn where it takes longer than `for_s`."""
        until_s = time.monotonic() + for_s
        while self._parts:
            self._take(self._parts.popleft())
            if time.monotonic() >= until_s:
                break
        self._read_on_or_pause()
        if not self._parts:  # nothing of any stream waits: compiled ones overtake nothing
            for leg in self._may_become_plain:
                leg.begin_plain()
            self._may_become_plain.clear()

    def _take_plain(self, data: bytes) -> bytes:
        """What of this frame is not the next tokens of a plain stream."""
        return data if self._plain is None else self._plain.take(data, time.monotonic())

    def _flush_plain(self) -> None:
        if self._plain is not None and (gaps_s := self._plain.flush()):
            self._on_gaps(gaps_s, time.monotonic())

    def _put(self, parts: Sequence[StreamPart]) -> None:
        """What begins a stream is passed on now: it does not wait behind the tokens of others."""
        for part in parts:
            leg = self._legs.get(part.stream)
            if part.stream == LINK or (leg is not None and not leg.has_begun):
                self._take(part)
            elif leg is not None:
                self._parts.append(part)

    def _take(self, part: StreamPart) -> None:
        if part.stream == LINK:
            self._on_leaving(part.leaves_in_s or 0.0)
        leg = self._legs.get(part.stream)
        if leg is None:
            return
        try:
            batch = batch_of(leg, part)
        except Exception:
            self.close("the proxy could not read it")  # nothing would be read from it any more
            raise
        if batch.failure is not None:
            del self._legs[part.stream]  # the service has forgotten it, too
        leg.take(batch, self._heard_s)
        if self._plain is not None:
            self._may_become_plain.append(leg)

    def _read_on_or_pause(self) -> None:
        if self.is_closed or self._transport is None:
            return
        has_more = bool(self._parts)
        if has_more and not self._is_paused:
            self._transport.pause_reading()
        elif self._is_paused and not has_more:
            self._transport.resume_reading()
        self._is_paused = has_more
        if has_more:
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        if not self.is_closed:
            self._heard_s = asyncio.get_running_loop().time()
            self._pass_on(TURN_S)

    def _check_silence(self) -> None:
        loop = asyncio.get_running_loop()
        is_silent = loop.time() - self._heard_s > SILENT_S
        if is_silent and self._was_silent:
            self.close(f"nothing was heard for {SILENT_S:g} s")
            return
        self._was_silent = is_silent  # if it was this process that stood still, the next look will tell
        self._watch = loop.call_later(BEAT_S, self._check_silence)
        for leg in list(self._legs.values()):
            leg.check_stall(loop.time())

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._head)
        connection: socket.socket | None = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        loop = asyncio.get_running_loop()
        self._heard_s = loop.time()
        self._watch = loop.call_later(BEAT_S, self._check_silence)

    def data_received(self, data: bytes) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        try:
            body = self._parser.feed(data)
            head = self._parser.head
            if head is not None and head.status != 200:
                self.close(f"it was refused with status {head.status}")
                return
            for data in self._splitter.push(body):
                if (rest := self._take_plain(data)) or not data:
                    self._put(decode_to_proxy(rest))
            self._flush_plain()
        except (MalformedResponse, FrameTooLong, msgspec.MsgspecError) as error:
            self._end(str(error))
            return
        if self._parser.is_complete:
            self._end("the engine has closed it")
        elif not self._is_paused:
            self._pass_on(TURN_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(str(exc or "the connection was closed"))

    def _end(self, reason: str) -> None:
        """Nothing more comes: streams may end with what is here already."""
        if not self.is_closed:
            self._pass_on(math.inf)
        self.close(reason)
