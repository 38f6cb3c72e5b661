"""Small POST routes: a JSON body in, a JSON answer out, errors in OpenAI's shape."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from proxy.asgi import Receive, Scope, Send
from proxy.client import Client, ClientGone
from proxy.errors import ProxyError
from proxy.settings import ProxySettings

logger = logging.getLogger(__name__)

Handler = Callable[[bytes], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class JsonEndpoint:
    """The ASGI application behind one path; `handle` gets the body and returns the answer's JSON."""

    handle: Handler
    settings: ProxySettings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings = self.settings
        client = Client(
            scope,
            receive,
            send,
            stall_timeout_s=settings.client_stall_timeout_s,
            max_backlog_bytes=settings.client_backlog_bytes,
        )
        try:
            body = await client.read_body(settings.max_body_bytes, settings.body_timeout_s)
            await client.send_json(200, await self.handle(body))
        except ClientGone:
            pass
        except ProxyError as error:
            await client.send_error(error)
        except Exception:
            logger.exception("%s failed inside the proxy", scope["path"])
            await client.send_error(ProxyError("the proxy failed to serve this request", code="internal"))
