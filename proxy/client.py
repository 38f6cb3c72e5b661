"""The client's side of one exchange: its body, its answer, and the moment it leaves."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from proxy.asgi import Receive, Scope, Send
from proxy.errors import BodyTooLarge, BodyTooSlow, ProxyError, WrongKey
from proxy.event_writer import EventWriter
from proxy.http_protocol import ABORT, ON_LEFT, OUTLET, WRITE
from proxy.native.loading import Outlet
from wire.json_body import to_json

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
        extensions = scope.get("extensions", {})
        self._abort = extensions.get(ABORT)
        self._write = extensions.get(WRITE)
        self._make_outlet = extensions.get(OUTLET)
        self._on_left = extensions.get(ON_LEFT)
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._has_head = False
        self.headers: dict[str, str] = {}
        """Sent with whatever the answer is."""

    @property
    def has_started(self) -> bool:
        """A status line is out, or on its way."""
        return self._has_head or self._writer is not None

    def header(self, name: str) -> str | None:
        value = self._headers.get(name.lower().encode())
        return None if value is None else value.decode("latin-1")

    async def read_body(self, max_bytes: int, timeout_s: float) -> bytes:
        """The whole body; `BodyTooLarge` as soon as it is known to be longer than `max_bytes`."""
        if int(self._headers.get(b"content-length", b"0")) > max_bytes:
            raise _too_large(max_bytes)
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

    @contextmanager
    def watched(self, gone: Callable[[ClientGone], None]) -> Iterator[None]:
        """`gone` is called when the client leaves, or is given up; the body must have been read."""

        def left(_: object = None) -> None:
            if self._writer is None or not self._writer.has_sent_all:
                gone(ClientGone())

        waiting, forget = None, None
        if self._on_left is not None:
            forget = self._on_left(left)
        else:
            waiting = asyncio.create_task(self._wait_until_left(left))
        self.gave_up.add_done_callback(left)
        try:
            yield
        finally:
            self.gave_up.remove_done_callback(left)
            if forget is not None:
                forget()
            if waiting is not None:
                waiting.cancel()

    async def _wait_until_left(self, left: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        left()

    async def send_json(self, status: int, content: bytes) -> None:
        await self._send_head(
            status, {"content-type": "application/json", "content-length": str(len(content))}
        )
        await self._send({"type": "http.response.body", "body": content})

    async def send_error(self, error: ProxyError) -> None:
        """The error as this response's status and body; nothing may have been sent before."""
        self.headers.update(error.headers)
        content = to_json(error.body)
        if not isinstance(error, BodyTooLarge | BodyTooSlow | WrongKey):
            await self.send_json(error.status, content)
            return
        self.headers["connection"] = "close"
        await self._send_head(
            error.status, {"content-type": "application/json", "content-length": str(len(content))}
        )
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
                **({} if self._write is None else {"write": self._write}),
            )
        self._writer.put(events)

    def outlet(self) -> tuple[bool, Outlet | None]:
        """Whether events may be written by others from now on, and where; None: by `send_events` alone."""
        if self._writer is None or not self._has_head:
            return False, None
        if self._make_outlet is None:
            return True, None
        if self._writer.outlet is None:
            outlet = self._make_outlet()
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
        if self.gave_up.done() and self._abort is not None:
            self._abort()

    async def _send_part(self, data: bytes, is_last: bool) -> None:
        if not self._has_head:
            await self._send_head(
                200,
                {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"},
            )
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def _send_head(self, status: int, headers: Mapping[str, str]) -> None:
        assert not self._has_head
        self._has_head = True
        raw = [
            (name.encode(), value.encode("latin-1")) for name, value in {**self.headers, **headers}.items()
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _drop_body(self) -> None:
        try:
            async with asyncio.timeout(LINGER_S):
                while (await self._receive()).get("more_body", False):
                    pass
        except TimeoutError:
            pass


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {max_bytes} bytes, the limit of this server")
