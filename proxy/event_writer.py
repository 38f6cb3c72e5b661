"""Sends one stream's events to its client; what a slow reader has not taken yet waits here, up to a limit.

Whoever generates tokens never waits for a client: `put` returns at once. Everything that was put in one
turn of the event loop leaves as one part, without a task: only while a client's buffers are full does a task
wait for them. A client that leaves more unread than the limit, or reads nothing for a while, is given up.
"""

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from typing import Any

from proxy.native.loading import Outlet

SendPart = Callable[[bytes, bool], Coroutine[Any, Any, None]]
"""Sends a part of a body, and whether it is the last; waits while the client's buffers are full."""
WritePart = Callable[[bytes], bool]
"""Writes a part of a body at once; False where that has to wait, or is to be done by `SendPart`."""


def _never(data: bytes) -> bool:
    return False


class EventWriter:
    """Owned by the stream's `Client`."""

    def __init__(
        self,
        send: SendPart,
        gave_up: asyncio.Future[None],
        *,
        max_backlog_bytes: int,
        stall_timeout_s: float,
        write: WritePart = _never,
    ) -> None:
        """`gave_up` becomes done when the client has been given up."""
        self.outlet: Outlet | None = None
        """Others write events to it while this has none to send before them."""
        self._send = send
        self._write_now = write
        self._gave_up = gave_up
        self._max_backlog_bytes = max_backlog_bytes
        self._stall_timeout_s = stall_timeout_s
        self._backlog: list[bytes] = []
        self._num_bytes = 0
        self._is_ended = False
        self._is_last = False
        """What was sent latest ends the stream."""
        self._is_due = False
        """The backlog leaves at the end of this turn."""
        self._loop = asyncio.get_running_loop()
        self._sent_all: asyncio.Future[None] = self._loop.create_future()
        self._waiting: asyncio.Task[None] | None = None
        self._waiting_since_s = 0.0
        # A timer a stream, not one for every token.
        self._watch: asyncio.TimerHandle | None = self._loop.call_later(
            stall_timeout_s / 4, self._check_stall
        )

    @property
    def num_backlog_bytes(self) -> int:
        """What has not been handed to the connection yet."""
        return self._num_bytes

    @property
    def has_sent_all(self) -> bool:
        """The end of the stream, too."""
        return self._sent_all.done() and not self._sent_all.cancelled()

    def share(self, outlet: Outlet) -> None:
        """Let others write to this connection, whenever that does not overtake anything."""
        self.outlet = outlet
        outlet.is_behind = bool(self._backlog) or self._waiting is not None

    def put(self, events: bytes) -> None:
        """Send these bytes behind all others."""
        if self.outlet is not None:
            self.outlet.is_behind = True
        self._backlog.append(events)
        self._num_bytes += len(events)
        if self._num_bytes > self._max_backlog_bytes:
            self._give_up()
        if not self._is_due and self._waiting is None:
            self._is_due = True
            self._loop.call_soon(self._write)

    async def end(self) -> None:
        """Return when everything is sent, and the end of the stream behind it."""
        self._is_ended = True
        self._shut_outlet()
        self._write()
        if not self._sent_all.done():
            await asyncio.wait((self._sent_all, self._gave_up), return_when=asyncio.FIRST_COMPLETED)

    def _shut_outlet(self) -> None:
        """For good: what follows on this connection is another response."""
        if self.outlet is not None:
            self.outlet.is_behind = True

    async def close(self) -> None:
        self._is_ended = True
        self._shut_outlet()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None  # it knows this object
        self._sent_all.cancel()
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.gather(self._waiting, return_exceptions=True)

    def _write(self) -> None:
        """Send the backlog as far as that needs no waiting."""
        self._is_due = False
        if self._waiting is not None or self._sent_all.done() or self._gave_up.done():
            return
        if not self._backlog and not self._is_ended:
            return
        if not self._is_ended:
            data = self._backlog[0] if len(self._backlog) == 1 else b"".join(self._backlog)
            if self._write_now(data):
                self._backlog.clear()
                self._num_bytes = 0
                self._caught_up()
                return
        sending, num_bytes = self._next_part()
        try:
            # The first step of an ASGI server's `send` is its last, unless the client's buffers are full.
            awaited = sending.send(None)
        except StopIteration:
            self._sent(num_bytes)
            self._caught_up()
        except Exception:  # whatever it is, nothing more can be sent
            self._give_up()
        else:
            self._waiting_since_s = self._loop.time()
            self._waiting = self._loop.create_task(self._wait(_resumed(sending, awaited), num_bytes))

    async def _wait(self, sending: Awaitable[None], num_bytes: int) -> None:
        """Until the client has taken this part, and all that gathers meanwhile."""
        try:
            await sending
            self._sent(num_bytes)
            while self._backlog or (self._is_ended and not self._sent_all.done()):
                more, num_bytes = self._next_part()
                self._waiting_since_s = self._loop.time()
                await more
                self._sent(num_bytes)
            self._caught_up()
        except Exception:
            self._give_up()
        finally:
            self._waiting = None

    def _caught_up(self) -> None:
        if self.outlet is not None and not self._is_ended:
            self.outlet.is_behind = False

    def _next_part(self) -> tuple[Coroutine[Any, Any, None], int]:
        data = self._backlog[0] if len(self._backlog) == 1 else b"".join(self._backlog)
        self._backlog.clear()
        self._is_last = self._is_ended
        return self._send(data, self._is_last), len(data)

    def _sent(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes
        if self._is_last and not self._sent_all.done():
            self._sent_all.set_result(None)

    def _check_stall(self) -> None:
        is_stalled = self._waiting is not None and (
            self._loop.time() - self._waiting_since_s > self._stall_timeout_s
        )
        if is_stalled:
            self._give_up()
        elif not self._sent_all.done():
            self._watch = self._loop.call_later(self._stall_timeout_s / 4, self._check_stall)

    def _give_up(self) -> None:
        if not self._gave_up.done():
            self._gave_up.set_result(None)


@types.coroutine
def _resumed(coroutine: Coroutine[Any, Any, None], awaited: object) -> Generator[Any, Any, None]:
    """The rest of a coroutine whose first step was taken by hand, and waits for `awaited`."""
    while True:
        try:
            answer = yield awaited
        except BaseException as error:
            step = partial(coroutine.throw, error)
        else:
            step = partial(coroutine.send, answer)
        try:
            awaited = step()
        except StopIteration:
            return
        finally:
            del step  # an error that goes on knows this frame
