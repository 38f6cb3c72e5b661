"""Every answer has an `x-request-id`: the client's, where it is one, or a fresh one."""

import re
from dataclasses import dataclass

from proxy.asgi import ASGIApp, Message, Receive, Scope, Send
from proxy.unguessable import new_id

HEADER = b"x-request-id"
_VALID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


def accepted_id(given: str | None) -> str | None:
    """The id that a client gave; None for none, or one that could break a log line."""
    return given if given is not None and _VALID.fullmatch(given) else None


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
                    given = dict(scope["headers"]).get(HEADER, b"").decode("latin-1")
                    message["headers"] = [*headers, (HEADER, (accepted_id(given) or new_id()).encode())]
            await send(message)

        await self.app(scope, receive, send_with_id)
