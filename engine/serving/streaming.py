"""Answers whose work stops the moment the client leaves.

Starlette notices a departed client only while it sends; an engine can be silent for seconds. Both helpers
here watch the connection from the first moment.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

ResultT = TypeVar("ResultT")


class ClientLeft(Exception):
    """The client closed the connection before its answer was complete."""


async def unless_client_leaves(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run `work`; cancel it and raise `ClientLeft` when the client disconnects first."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnect(request.receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class EventStream(Response):
    """A `text/event-stream` of already framed events; the iterator is closed when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(content=None)
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-store"
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_all(send))
        watching = asyncio.create_task(_disconnect(receive))
        try:
            await asyncio.wait((sending, watching), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            watching.cancel()
            sending.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:  # type: ignore[type-var]  # generators have aclose
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
