"""The client's side of one exchange: its body, its answer, and the moment it leaves."""

import asyncio
from collections.abc import Callable, Mapping

from proxy.asgi import Receive, Scope, Send
from proxy.errors import BodyTooLarge, BodyTooSlow, ProxyError, WrongKey
from proxy.event_writer import EventWriter
from proxy.http_protocol import EXCHANGE, Exchange
from proxy.native.loading import Outlet
from wire.json_body import to_json

_JSON = {"content-type": "application/json"}
_EVENTS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
LINGER_S = 2.0
"""How long the rest of a refused body is read and dropped, so that the client gets to read its 413."""


class ClientGone(Exception):
    """The client closed its connection; nobody is left to answer."""


class Client:
    """Reads the request's body and writes its answer, either whole or as a stream of events."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, *, stall_timeout_s: float, max_backlog_bytes: int
    ) -> None:
        """A stream's client may leave up to `max_backlog_bytes` unread, none for up to `stall_timeout_s`."""
        self._receive = receive
        self._send = send
        self._stall_timeout_s = stall_timeout_s
        self._max_backlog_bytes = max_backlog_bytes
        self._writer: EventWriter | None = None
        self.gave_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when a stream's client is given up because it does not read."""
        self._exchange: Exchange | None = scope.get("extensions", {}).get(EXCHANGE)
        """None behind servers of others."""
        self._gone: Callable[[ClientGone], None] | None = None
        self._forget: Callable[[], None] | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._has_head = False
        self.headers: dict[str, str] = {}
        """Sent with whatever the answer is."""

    @property
    def has_started(self) -> bool:
        """A status line is out, or on its way."""
        return self._has_head or self._writer is not None

    def header(self, name: bytes) -> str | None:
        """`name` in small letters."""
        return self._headers[name].decode("latin-1") if name in self._headers else None

    async def read_body(self, max_bytes: int, timeout_s: float) -> bytes:
        """The whole body; `BodyTooLarge` as soon as it is known to be longer than `max_bytes`."""
        if int(self._headers.get(b"content-length", b"0")) > max_bytes:
            raise _too_large(max_bytes)
        body = None if self._exchange is None else self._exchange.whole_body(max_bytes)
        if body is not None:
            return body
        try:
            async with asyncio.timeout(timeout_s):
                return await self._read_up_to(max_bytes)
        except TimeoutError:
            raise BodyTooSlow(f"the body did not arrive within {timeout_s:g} s") from None

    async def _read_up_to(self, max_bytes: int) -> bytes:
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body += message.get("body", b"")
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
            if not message.get("more_body", False):
                return bytes(body)

    def watch(self, gone: Callable[[ClientGone], None]) -> None:
        """`gone` is called when the client leaves, or is given up; the body must have been read."""
        self._gone = gone
        if self._exchange is not None:
            self._forget = self._exchange.on_left(self._has_left)
        else:
            self._waiting = asyncio.create_task(self._wait_until_left())
        self.gave_up.add_done_callback(self._has_left)

    def unwatch(self) -> None:
        self.gave_up.remove_done_callback(self._has_left)
        if self._forget is not None:
            self._forget()
        if self._waiting is not None:
            self._waiting.cancel()
        self._gone = self._forget = self._waiting = None  # one of them is a circle

    def _has_left(self, _: object = None) -> None:
        if self._gone is not None and (self._writer is None or not self._writer.has_sent_all):
            self._gone(ClientGone())

    async def _wait_until_left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._has_left()

    async def send_json(self, status: int, content: bytes) -> None:
        if self._exchange is not None and self._exchange.respond(status, self._lines(_JSON), content):
            self._has_head = True
            return
        await self._send_head(status, {**_JSON, "content-length": str(len(content))})
        await self._send({"type": "http.response.body", "body": content})

    async def send_error(self, error: ProxyError) -> None:
        """The error as this response's status and body; nothing may have been sent before."""
        self.headers.update(error.headers)
        content = to_json(error.body)
        if not isinstance(error, BodyTooLarge | BodyTooSlow | WrongKey):
            await self.send_json(error.status, content)
            return
        self.headers["connection"] = "close"
        await self._send_head(error.status, {**_JSON, "content-length": str(len(content))})
        await self._send({"type": "http.response.body", "body": content, "more_body": True})
        await self._drop_body()
        await self._send({"type": "http.response.body", "body": b""})

    def send_events(self, events: bytes) -> None:
        """Server-sent events, already framed; the first ones bring the status line with them. Never waits."""
        if self._writer is None:
            self._writer = EventWriter(
                self._send_part,
                self.gave_up,
                max_backlog_bytes=self._max_backlog_bytes,
                stall_timeout_s=self._stall_timeout_s,
                **({} if self._exchange is None else {"write": self._exchange.write}),
            )
        self._writer.put(events)

    def outlet(self) -> tuple[bool, Outlet | None]:
        """Whether events may be written by others from now on, and where; None: by `send_events` alone."""
        if self._writer is None or not self._has_head:
            return False, None
        if self._exchange is None:
            return True, None
        if self._writer.outlet is None:
            outlet = self._exchange.make_outlet()
            if outlet is None:
                return False, None
            self._writer.share(outlet)
        return True, self._writer.outlet

    async def end_events(self, events: bytes) -> None:
        """The last events and the end of the stream; returns when the client's connection has them."""
        self.send_events(events)
        assert self._writer is not None
        await self._writer.end()

    async def close(self) -> None:
        """Send nothing more; a client that was given up loses its connection, whatever it has not read."""
        if self._writer is not None:
            await self._writer.close()
            self._writer = None  # it knows this object
        if self.gave_up.done() and self._exchange is not None:
            self._exchange.abort()

    async def _send_part(self, data: bytes, is_last: bool) -> None:
        if not self._has_head:
            if self._exchange is not None and self._exchange.begin(self._lines(_EVENTS), data):
                self._has_head = True
                if not is_last:
                    return
                data = b""
            else:
                await self._send_head(200, _EVENTS)
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def _send_head(self, status: int, headers: Mapping[str, str]) -> None:
        assert not self._has_head
        self._has_head = True
        raw = [
            (name.encode(), value.encode("latin-1")) for name, value in {**self.headers, **headers}.items()
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    def _lines(self, headers: Mapping[str, str]) -> bytes:
        """Headers of the answer, with its own, as they are sent."""
        lines = [f"{name}: {value}\r\n" for name, value in (*self.headers.items(), *headers.items())]
        text = "".join(lines)
        if not text.count("\n") == text.count("\r") == len(lines):
            raise ValueError(f"a header of the answer has a line break in it: {lines}")
        return text.encode("latin-1")

    async def _drop_body(self) -> None:
        try:
            async with asyncio.timeout(LINGER_S):
                while (await self._receive()).get("more_body", False):
                    pass
        except TimeoutError:
            pass


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {max_bytes} bytes, the limit of this server")
