"""One TCP connection to an engine: a request out, its response in, then perhaps another request."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias, cast

from proxy.response_parser import MalformedResponse, ResponseHead, ResponseParser

MAX_BUFFERED_BYTES = 1 << 18
"""Unread body beyond this pauses the socket, which in time pauses the engine."""


WaitFor: TypeAlias = Callable[[asyncio.Future[None]], Awaitable[None]]


class ConnectionBroken(Exception):
    """The connection ended, or spoke no HTTP, before the response was complete."""


class NotConnected(Exception):
    """No connection came about; `is_slow`: not in time."""

    def __init__(self, error: OSError) -> None:
        self.is_slow = isinstance(error, TimeoutError)
        super().__init__("timed out" if self.is_slow else str(error) or type(error).__name__)


class EngineConnection(asyncio.Protocol):
    """Carries one exchange at a time; `is_idle` between them."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: ResponseParser | None = None
        self._body: list[bytes] = []
        self._num_buffered = 0
        self._is_paused = False
        self._waiting: asyncio.Future[None] | None = None
        self._failure: ConnectionBroken | None = None
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Open, and whatever was exchanged is complete: the next request may be sent."""
        is_between = self._parser is None or (self._parser.is_complete and self._parser.is_reusable)
        return is_between and not self._is_closed and not self._body and not self._is_paused

    async def exchange(self, request: bytes, wait: WaitFor | None = None) -> ResponseHead:
        """Send a whole request; returns once the response's head is in. Raises `ConnectionBroken`.

        `wait`: awaits a future, and knows how long that may take.
        """
        assert self.is_idle
        assert self._transport is not None
        parser = self._parser = ResponseParser()
        self._transport.write(request)
        while parser.head is None:
            await self._wait(wait)
        return parser.head

    async def read(self) -> bytes | None:
        """All body bytes that have arrived, at least one; None at the end. Raises `ConnectionBroken`."""
        assert self._parser is not None
        while not self._body:
            if self._parser.is_complete:
                return None
            await self._wait()
        return self._take_body()

    def abort(self) -> None:
        """Close at once; to an engine in the middle of a request this is the signal to abort it."""
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()

    def whole_body(self) -> bytes | None:
        """All of the body, where it is here already; one so long that reading has paused is for `read`."""
        assert self._parser is not None
        return self._take_body() if self._parser.is_complete and not self._is_paused else None

    def _take_body(self) -> bytes:
        data = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        self._num_buffered = 0
        if self._is_paused and self._transport is not None and not self._is_closed:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    async def _wait(self, wait: WaitFor | None = None) -> None:
        """Until something arrives; one caller at a time."""
        if self._failure is not None:
            raise self._failure
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await (self._waiting if wait is None else wait(self._waiting))
        finally:
            self._waiting = None

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._parser.is_complete:
            self.abort()  # nobody asked
            return
        try:
            body = self._parser.feed(data)
        except MalformedResponse as error:
            self._fail(str(error))
            return
        if body:
            self._body.append(body)
            self._num_buffered += len(body)
            if self._num_buffered > MAX_BUFFERED_BYTES and not self._is_paused:
                assert self._transport is not None
                self._is_paused = True
                self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        return False  # close our side too

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closed = True
        if self._parser is not None and not self._parser.is_complete:
            try:
                self._parser.feed_eof()
            except MalformedResponse as error:
                self._failure = self._failure or ConnectionBroken(str(exc or error))
        self._wake()

    def _fail(self, reason: str) -> None:
        self._failure = ConnectionBroken(reason)
        self.abort()
        self._wake()
