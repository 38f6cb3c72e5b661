"""uvicorn's HTTP/1.1, with what ASGI has no words for, and with a way past ASGI's layers.

An endpoint finds an `Exchange` among its scope's extensions: the request's body where it is here already, a
response that is written at once, the end of the connection without a task that waits for it.

A response's head leaves together with the first part of its body, if that comes in the same turn of the event
loop: uvicorn writes them one by one, and each write is a call of the kernel and wakes the client.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast
from weakref import ref

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from proxy.asgi import ASGIApp
from proxy.native.loading import Outlet

EXCHANGE = "tandem.exchange"
"""In a scope's `extensions`: an `Exchange`."""
Headers = Sequence[tuple[bytes, bytes]]


class ServesDirectly(ABC):
    """An ASGI application some of whose endpoints may be called without going through it."""

    @abstractmethod
    def direct_endpoint(self, path: bytes, headers: Headers) -> ASGIApp | None:
        """Who answers this POST request, and adds nothing on the way; None: it takes the ordinary way."""


class HttpProtocol(HttpToolsProtocol):
    _left: Callable[[], None] | None = None
    """Of the exchange under way; one at a time, however many requests were sent ahead."""
    _outlet: Outlet | None = None
    """Of the latest exchange that asked for one."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.heads_wait = HeadsWait(transport)
        self.transport = cast(asyncio.Transport, self.heads_wait)
        app = cast(object, self.app)
        self._direct_endpoint = app.direct_endpoint if isinstance(app, ServesDirectly) else _no_endpoint

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._pause_outlet(True)
        self._outlet = None
        left, self._left = self._left, None
        if left is not None:
            left()
        if self.scope is not None:
            # They know this protocol: nobody but the garbage collector would free what is in a circle.
            self.scope.pop("extensions", None)

    def on_headers_complete(self) -> None:
        parser, endpoint = self.parser, self._direct_endpoint(self.url, self.headers)
        is_plain = parser.get_method() == b"POST" and parser.get_http_version() == "1.1"
        if endpoint is None or not is_plain or parser.should_upgrade():
            self._begin_ordinary()
        else:
            self._begin_direct(endpoint)

    def _begin_ordinary(self) -> None:
        scope = self.scope
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is scope:  # no other protocol was asked for
            scope["extensions"] = {EXCHANGE: Exchange(self, self.cycle, is_direct=False)}  # type: ignore[dict-item]

    def _begin_direct(self, endpoint: ASGIApp) -> None:
        """What uvicorn does in `on_headers_complete`, where path and method are known."""
        before = self.cycle
        self.scope["method"] = "POST"
        self.scope["path"] = self.url.decode("ascii")
        self.scope["raw_path"] = self.url
        self.scope["query_string"] = b""
        self.cycle = RequestResponseCycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        # The type knows only the extensions that ASGI names, which are dictionaries.
        self.scope["extensions"] = {EXCHANGE: Exchange(self, self.cycle, is_direct=True)}  # type: ignore[dict-item]
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, endpoint)  # type: ignore[arg-type]
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, endpoint))  # type: ignore[arg-type]

    def pause_writing(self) -> None:
        super().pause_writing()
        self._pause_outlet(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._pause_outlet(False)

    def _pause_outlet(self, is_paused: bool) -> None:
        if self._outlet is not None:
            self._outlet.is_paused = is_paused or self.transport.is_closing()

    def make_outlet(self, is_paused: bool) -> Outlet:
        """See `Exchange.make_outlet`."""
        self._outlet = Outlet(self.heads_wait.pass_on, is_paused or self.transport.is_closing())
        return self._outlet

    def on_left(self, left: Callable[[], None]) -> Callable[[], None]:
        """See `Exchange.on_left`."""
        self._left = left
        if self.transport.is_closing():
            self.loop.call_soon(self._has_left, left)
        elif self.flow.read_paused and not self.pipeline:
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


def _no_endpoint(path: bytes, headers: Headers) -> ASGIApp | None:
    return None


class Exchange:
    """One request and its response, beside what ASGI's `receive` and `send` can do."""

    __slots__ = ("_cycle", "_is_direct", "_protocol")

    def __init__(self, protocol: HttpProtocol, cycle: RequestResponseCycle, *, is_direct: bool) -> None:
        """`is_direct`: no layer between server and endpoint has anything to add to the response."""
        self._protocol = protocol
        # A strong reference would be a circle with the scope, and wait for the garbage collector.
        self._cycle = ref(cycle)
        self._is_direct = is_direct

    def whole_body(self, max_bytes: int) -> bytes | None:
        """The request's body; None where some of it has to be waited or asked for, or it is longer."""
        cycle = self._cycle()
        if cycle is None or cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        if len(cycle.body) > min(HIGH_WATER_LIMIT, max_bytes):
            return None
        body, cycle.body = cycle.body, bytearray()
        cycle.message_event.clear()
        return bytes(body)

    def respond(self, status: int, headers: bytes, content: bytes) -> bool:
        """Write a whole response; False where that has to wait, or is not for the endpoint alone to say.

        `headers`: lines, each with its end; the length of the content is not among them.
        """
        cycle = self._writable()
        if cycle is None or not self._is_direct or cycle.response_started:
            return False
        head = self._head(cycle, status, headers)
        cycle.response_complete = True
        whole = (head, len(content), content)
        self._protocol.heads_wait.pass_on(b"%bcontent-length: %d\r\n\r\n%b" % whole)
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        return True

    def begin(self, headers: bytes, part: bytes) -> bool:
        """Write the head of a response with status 200, and a first part; False as `respond`."""
        cycle = self._writable()
        if cycle is None or not self._is_direct or cycle.response_started or not part:
            return False
        head = self._head(cycle, 200, headers)
        cycle.chunked_encoding = True
        chunk = (head, len(part), part)
        self._protocol.heads_wait.pass_on(b"%btransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % chunk)
        return True

    def write(self, part: bytes) -> bool:
        """Write a part of a chunked body; False where that has to wait, or behind no head."""
        cycle = self._writable()
        if cycle is None or not cycle.chunked_encoding:
            return False
        self._protocol.heads_wait.pass_on(b"%x\r\n%b\r\n" % (len(part), part))
        return True

    def make_outlet(self) -> Outlet | None:
        """What others may write chunks to; None where parts of the body are no chunks."""
        cycle = self._cycle()
        if cycle is None or not cycle.chunked_encoding or self._protocol.heads_wait.head:
            return None
        return self._protocol.make_outlet(cycle.flow.write_paused or cycle.disconnected)

    def on_left(self, left: Callable[[], None]) -> Callable[[], None]:
        """`left` is called when the client leaves before the response is complete; call what is returned to
        undo this."""
        return self._protocol.on_left(left)

    def abort(self) -> None:
        """Close the connection, and drop what was not sent yet.

        uvicorn itself would close it once everything is sent, which a client that does not read puts off for
        ever.
        """
        self._protocol.heads_wait.abort()

    def _writable(self) -> RequestResponseCycle | None:
        """None where what is written would have to wait, be it for a head."""
        cycle = self._cycle()
        if cycle is None or cycle.disconnected or cycle.response_complete:
            return None
        return None if cycle.flow.write_paused or self._protocol.heads_wait.head else cycle

    def _head(self, cycle: RequestResponseCycle, status: int, headers: bytes) -> bytes:
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        end = headers if cycle.keep_alive else headers + b"connection: close\r\n"
        return STATUS_LINE[status] + _lines(cycle.default_headers) + end


class _DefaultLines:
    """Headers of all responses as bytes: the server makes new ones once a second."""

    def __init__(self) -> None:
        self._headers: Headers = ()
        self._lines = b""

    def __call__(self, headers: Headers) -> bytes:
        if headers is not self._headers:
            self._headers = headers
            self._lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        return self._lines


_lines = _DefaultLines()


class HeadsWait:
    """A transport whose `write` keeps a response's head for the rest of the turn, or for what follows."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.head = b""
        """It waits."""
        self.pass_on = transport.write
        self.is_closing = transport.is_closing
        self.abort = transport.abort

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
