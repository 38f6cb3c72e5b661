"""uvicorn's HTTP/1.1, with a way to cut a connection: ASGI has none."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

ABORT = "tandem.abort"
"""In a scope's `extensions`: a function that closes the connection, and drops what was not sent yet.

uvicorn itself would close it once everything is sent, which a client that does not read puts off for ever."""


class HttpProtocol(HttpToolsProtocol):
    def on_message_begin(self) -> None:
        super().on_message_begin()
        # The type knows only the extensions that ASGI names, which are dictionaries.
        self.scope["extensions"] = {ABORT: self.transport.abort}  # type: ignore[dict-item]
