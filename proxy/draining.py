"""Ends the proxy politely: no new requests, running ones finish within a grace, then the server stops."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from proxy.asgi import ASGIApp, Message, Receive, Scope, Send
from proxy.errors import NotServing

CLOSE = (b"connection", b"close")


class Draining:
    """Counts open requests and knows whether new ones are taken."""

    def __init__(self) -> None:
        self._open: dict[int, Callable[[NotServing], None]] = {}
        """How to end each open request."""
        self._numbers = count()
        self._idle = asyncio.Event()
        self._idle.set()
        self._begun = asyncio.Event()
        self.is_expired = False

    @property
    def has_begun(self) -> bool:
        return self._begun.is_set()

    @property
    def num_open_requests(self) -> int:
        return len(self._open)

    def begin(self) -> None:
        self._begun.set()

    @contextmanager
    def admit(self, cut: Callable[[NotServing], None]) -> Iterator[None]:
        """Count an open request; raises `NotServing` once draining has begun.

        `cut` is called where the request outlives the grace.
        """
        if self.has_begun:
            raise NotServing("this proxy is shutting down", code="shutting_down")
        number = next(self._numbers)
        self._open[number] = cut
        self._idle.clear()
        try:
            yield
        finally:
            del self._open[number]
            if not self._open:
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


class ClosingConnections:
    """ASGI app around another: while it drains, each answer is the last on its connection.

    A client that keeps its connections would come to this proxy again and again, and be refused.
    """

    def __init__(self, app: ASGIApp, draining: Draining) -> None:
        self._app = app
        self._draining = draining

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
