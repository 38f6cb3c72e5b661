"""Ends the proxy politely: no new requests, running ones finish within a grace, then the server stops."""

import asyncio
from collections.abc import Callable
from itertools import count

from proxy.asgi import ASGIApp, Message, Receive, Scope, Send
from proxy.errors import NotServing
from proxy.http_protocol import Headers, ServesDirectly

CLOSE = (b"connection", b"close")


class Draining:
    """Knows the open requests, and whether new ones are taken."""

    def __init__(self) -> None:
        self._open: dict[int, Callable[[NotServing], None]] = {}
        """How to end each open request."""
        self._numbers = count()
        self._idle = asyncio.Event()
        """Set by the last request that ends while this proxy drains."""
        self._begun = asyncio.Event()
        self.has_begun = False
        self.is_expired = False

    @property
    def num_open_requests(self) -> int:
        return len(self._open)

    def begin(self) -> None:
        self.has_begun = True
        self._begun.set()
        if not self._open:
            self._idle.set()

    def enter(self, cut: Callable[[NotServing], None]) -> int:
        """Count an open request, until it leaves with this number; `NotServing` once draining has begun.

        `cut` is called where the request outlives the grace.
        """
        if self.has_begun:
            raise NotServing("this proxy is shutting down", code="shutting_down")
        number = next(self._numbers)
        self._open[number] = cut
        return number

    def leave(self, number: int) -> None:
        del self._open[number]
        if self.has_begun and not self._open:
            self._idle.set()

    async def finish(self, grace_s: float) -> None:
        """Wait for the signal, then for open requests; those that outlive the grace are cut with an error."""
        await self._begun.wait()
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            self.is_expired = True
            for cut in list(self._open.values()):
                cut(
                    NotServing(
                        "this proxy was shut down before the answer was complete", code="shutting_down"
                    )
                )
            await self._idle.wait()


class ClosingConnections(ServesDirectly):
    """ASGI app around another: while it drains, each answer is the last on its connection.

    A client that keeps its connections would come to this proxy again and again, and be refused.
    """

    def __init__(self, app: ASGIApp, draining: Draining) -> None:
        self._app = app
        self._draining = draining
        self._direct = app if isinstance(app, ServesDirectly) else None

    def direct_endpoint(self, path: bytes, headers: Headers) -> ASGIApp | None:
        if self._direct is None or self._draining.has_begun:
            return None
        return self._direct.direct_endpoint(path, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._draining.has_begun:
            send = _closing(send)
        await self._app(scope, receive, send)


def _closing(send: Send) -> Send:
    async def send_and_close(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), CLOSE]}
        await send(message)

    return send_and_close
