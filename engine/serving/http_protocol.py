"""uvicorn's HTTP/1.1, with what ASGI has no words for: how much may be on its way to a client."""

from functools import partial

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from wire.link_sending import hold_little

HOLD_LITTLE = "tandem.hold_little"
"""In a scope's `extensions`: a function after which `send` waits until nearly all of what it sent is read."""


class HttpProtocol(HttpToolsProtocol):
    def on_headers_complete(self) -> None:
        scope = self.scope
        super().on_headers_complete()
        # The type knows only the extensions that ASGI names, which are dictionaries.
        scope["extensions"] = {HOLD_LITTLE: partial(hold_little, self.transport)}  # type: ignore[dict-item]
