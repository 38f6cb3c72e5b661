"""Sends one stream's events to its client; what a slow reader has not taken yet waits here, up to a limit.

Whoever generates tokens never waits for a client: `put` returns at once. A client that leaves more unread
than the limit, or reads nothing for a while, is given up.
"""

import asyncio
from collections.abc import Awaitable, Callable

SendPart = Callable[[bytes, bool], Awaitable[None]]
"""Sends a part of a body, and whether it is the last; waits while the client's buffers are full."""


class EventWriter:
    """One writing task per stream; owned by the stream's `Client`."""

    def __init__(
        self, send: SendPart, gave_up: asyncio.Future[None], *, max_backlog_bytes: int, stall_timeout_s: float
    ) -> None:
        """`gave_up` becomes done when the client has been given up."""
        self._send = send
        self._gave_up = gave_up
        self._max_backlog_bytes = max_backlog_bytes
        self._stall_timeout_s = stall_timeout_s
        self._backlog: list[bytes] = []
        self._num_bytes = 0
        self._is_ended = False
        self._waiting: asyncio.Future[None] | None = None
        loop = asyncio.get_running_loop()
        self._sending_since_s: float | None = None
        # A timer a stream, not one for every token.
        self._watch = loop.call_later(stall_timeout_s / 4, self._check_stall)
        self._writing = loop.create_task(self._write())

    @property
    def num_backlog_bytes(self) -> int:
        """What has not been handed to the connection yet."""
        return self._num_bytes

    def put(self, events: bytes) -> None:
        """Send these bytes behind all others."""
        self._backlog.append(events)
        self._num_bytes += len(events)
        if self._num_bytes > self._max_backlog_bytes:
            self._give_up()
        self._wake()

    async def end(self) -> None:
        """Return when everything is sent, and the end of the stream behind it."""
        self._is_ended = True
        self._wake()
        await asyncio.wait((self._writing, self._gave_up), return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> None:
        self._watch.cancel()
        self._writing.cancel()
        await asyncio.gather(self._writing, return_exceptions=True)

    async def _write(self) -> None:
        loop, is_last = asyncio.get_running_loop(), False
        while not is_last:
            if not self._backlog and not self._is_ended:
                await self._more()
            data, is_last = b"".join(self._backlog), self._is_ended
            self._backlog.clear()
            self._sending_since_s = loop.time()
            await self._send(data, is_last)
            self._sending_since_s = None
            self._num_bytes -= len(data)

    async def _more(self) -> None:
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def _check_stall(self) -> None:
        loop, since_s = asyncio.get_running_loop(), self._sending_since_s
        if since_s is not None and loop.time() - since_s > self._stall_timeout_s:
            self._give_up()
        elif not self._writing.done():
            self._watch = loop.call_later(self._stall_timeout_s / 4, self._check_stall)

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _give_up(self) -> None:
        if not self._gave_up.done():
            self._gave_up.set_result(None)
