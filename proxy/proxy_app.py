"""The FastAPI application, with a way past its middleware and router for the requests that count."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI

from proxy.api_keys import is_let_in
from proxy.asgi import ASGIApp
from proxy.http_protocol import Headers, ServesDirectly
from settings.secret_keys import SecretKeys


class ProxyApp(FastAPI, ServesDirectly):
    """Requests that generate reach their endpoint at once, and their events the server.

    The router and the middleware wrap every part that is sent in a coroutine each. A request without a
    valid key takes the ordinary way, on which it is refused.
    """

    def __init__(
        self,
        keys: SecretKeys,
        version: str,
        lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]],
    ) -> None:
        super().__init__(
            title="Tandem",
            version=version,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,  # behind a proxy that ends TLS it would lead to http:
            lifespan=lifespan,
        )
        self._keys = keys
        self._direct: dict[bytes, ASGIApp] = {}

    def serve_directly(self, path: str, endpoint: ASGIApp) -> None:
        """POST requests with a key; the endpoint has a route, too, which answers all others."""
        self._direct[path.encode()] = endpoint

    def direct_endpoint(self, path: bytes, headers: Headers) -> ASGIApp | None:
        endpoint = self._direct.get(path)
        return endpoint if endpoint is not None and is_let_in(self._keys, headers) else None
