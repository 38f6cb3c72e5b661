"""uvicorn's HTTP/1.1, with what ASGI has no words for: cutting a connection, hearing of its end without a
task that waits for it, writing parts of a body without waiting, and heads that wait.

A response's head leaves together with the first part of its body, if that comes in the same turn of the event
loop: uvicorn writes them one by one, and each write is a call of the kernel and wakes the client.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import cast
from weakref import ref

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from proxy.native.loading import Outlet

ABORT = "tandem.abort"
"""In a scope's `extensions`: a function that closes the connection, and drops what was not sent yet.

uvicorn itself would close it once everything is sent, which a client that does not read puts off for ever."""
WRITE = "tandem.write"
"""A function that writes a part of a chunked body now; False where that has to wait, or behind no head."""
OUTLET = "tandem.outlet"
"""A function that returns what others may write chunks to; None where parts of the body are no chunks."""
ON_LEFT = "tandem.on_left"
"""A function that takes what is to be called when the client leaves before the response is complete, and
returns one that takes it back."""


class HttpProtocol(HttpToolsProtocol):
    _left: Callable[[], None] | None = None
    """Of the exchange under way; one at a time, however many requests were sent ahead."""
    _outlet: Outlet | None = None
    """Of the latest exchange that asked for one."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = cast(asyncio.Transport, HeadsWait(transport))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._pause_outlet(True)
        left, self._left = self._left, None
        if left is not None:
            left()

    def on_headers_complete(self) -> None:
        scope = self.scope
        super().on_headers_complete()
        if self.cycle is None or self.cycle.scope is not scope:
            return  # another protocol was asked for
        # The type knows only the extensions that ASGI names, which are dictionaries.
        scope["extensions"] = {
            ABORT: self.transport.abort,  # type: ignore[dict-item]
            WRITE: partial(_write, ref(self.cycle), cast(HeadsWait, self.transport)),  # type: ignore[dict-item]
            OUTLET: partial(self._make_outlet, ref(self.cycle)),  # type: ignore[dict-item]
            ON_LEFT: self._on_left,  # type: ignore[dict-item]
        }

    def pause_writing(self) -> None:
        super().pause_writing()
        self._pause_outlet(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._pause_outlet(False)

    def _pause_outlet(self, is_paused: bool) -> None:
        if self._outlet is not None:
            self._outlet.is_paused = is_paused or self.transport.is_closing()

    def _make_outlet(self, exchange: ref[RequestResponseCycle]) -> Outlet | None:
        cycle, transport = exchange(), cast(HeadsWait, self.transport)
        if cycle is None or not cycle.chunked_encoding or transport.head:
            return None
        self._outlet = Outlet(transport.pass_on, cycle.flow.write_paused or cycle.disconnected)
        return self._outlet

    def _on_left(self, left: Callable[[], None]) -> Callable[[], None]:
        self._left = left
        if self.transport.is_closing():
            self.loop.call_soon(self._has_left, left)
        elif not self.pipeline:
            # The body was long enough to stop reading, and nobody asks for more of it.
            self.flow.resume_reading()
        return partial(self._forget, left)

    def _forget(self, left: Callable[[], None]) -> None:
        if self._left is left:  # or it is of the next request already, which was sent ahead
            self._left = None

    def _has_left(self, left: Callable[[], None]) -> None:
        if self._left is left:
            self._left = None
            left()


def _write(exchange: ref[RequestResponseCycle], transport: "HeadsWait", data: bytes) -> bool:
    """A strong reference would be a circle with the scope, and wait for the garbage collector."""
    cycle = exchange()
    if cycle is None or not cycle.chunked_encoding or cycle.flow.write_paused or cycle.disconnected:
        return False
    if transport.head:
        return False
    transport.pass_on(b"%x\r\n%b\r\n" % (len(data), data))
    return True


class HeadsWait:
    """A transport whose `write` keeps a response's head for the rest of the turn, or for what follows."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.head = b""
        """It waits."""
        self.pass_on = transport.write

    def write(self, data: bytes) -> None:
        if self.head:
            data, self.head = self.head + data, b""
        elif data.startswith(b"HTTP/1.1 "):
            self.head = data
            asyncio.get_running_loop().call_soon(self._let_go)
            return
        self._transport.write(data)

    def close(self) -> None:
        self._let_go()
        self._transport.close()

    def _let_go(self) -> None:
        head, self.head = self.head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)

    def __getattr__(self, name: str) -> object:
        """All else is the transport's own affair."""
        return getattr(self._transport, name)
