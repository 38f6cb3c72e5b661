"""The front door: routes that cost something need one of the API keys, where any are configured."""

from dataclasses import dataclass

from proxy.asgi import ASGIApp, Receive, Scope, Send
from proxy.client import Client
from proxy.errors import WrongKey
from proxy.http_protocol import Headers
from proxy.metrics import ProxyMetrics
from proxy.settings import ProxySettings
from settings.secret_keys import SecretKeys, bearer_token

PROTECTED = ("/v1/", "/tokenize", "/detokenize")
"""Beginnings of paths; health, metrics, the version and the web page are for operators and open."""


def is_let_in(keys: SecretKeys, headers: Headers) -> bool:
    """No key is needed, or the request has one of them."""
    if not keys.is_required:
        return True
    given = bearer_token(headers)
    return given is not None and keys.accept(given)


@dataclass(frozen=True, slots=True)
class ApiKeyCheck:
    """Middleware; answers 401 before anything of the body is read."""

    app: ASGIApp
    keys: SecretKeys
    settings: ProxySettings
    metrics: ProxyMetrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope):
            await self.app(scope, receive, send)
            return
        self.metrics.refused_keys.inc()
        await self._refuse(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return not scope["path"].startswith(PROTECTED) or is_let_in(self.keys, scope["headers"])

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings = self.settings
        client = Client(
            scope,
            receive,
            send,
            stall_timeout_s=settings.client_stall_timeout_s,
            max_backlog_bytes=settings.client_backlog_bytes,
        )
        error = WrongKey("no API key, or one that is not known; send 'Authorization: Bearer KEY'")
        error.headers["www-authenticate"] = "Bearer"
        await client.send_error(error)
