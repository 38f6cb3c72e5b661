"""Every answer has an `x-request-id`: the client's, where it is one, or a fresh one."""

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from proxy.asgi import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
_VALID = re.compile(rb"[\w.:-]{1,128}", re.ASCII)


def client_request_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The id that the client gave; None for none, or one that could break a log line."""
    given = next((value for name, value in headers if name == HEADER), b"")
    return given if _VALID.fullmatch(given) else None


@dataclass(frozen=True, slots=True)
class RequestIds:
    """Middleware that leaves answers alone which have an id already."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.setdefault("headers", [])
                if all(name != HEADER for name, _ in headers):
                    given = client_request_id(scope["headers"])
                    message["headers"] = [*headers, (HEADER, given or secrets.token_hex(16).encode())]
            await send(message)

        await self.app(scope, receive, send_with_id)
