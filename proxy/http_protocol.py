"""uvicorn's HTTP/1.1, with two things that ASGI has no words for: cutting a connection, and heads that wait.

A response's head leaves together with the first part of its body, if that comes in the same turn of the event
loop: uvicorn writes them one by one, and each write is a call of the kernel and wakes the client.
"""

import asyncio
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

ABORT = "tandem.abort"
"""In a scope's `extensions`: a function that closes the connection, and drops what was not sent yet.

uvicorn itself would close it once everything is sent, which a client that does not read puts off for ever."""


class HttpProtocol(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = cast(asyncio.Transport, HeadsWait(transport))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # The type knows only the extensions that ASGI names, which are dictionaries.
        self.scope["extensions"] = {ABORT: self.transport.abort}  # type: ignore[dict-item]


class HeadsWait:
    """A transport whose `write` keeps a response's head for the rest of the turn, or for what follows."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 "):
            self._head = data
            asyncio.get_running_loop().call_soon(self._let_go)
            return
        self._transport.write(data)

    def close(self) -> None:
        self._let_go()
        self._transport.close()

    def _let_go(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)

    def __getattr__(self, name: str) -> object:
        """All else is the transport's own affair."""
        return getattr(self._transport, name)
