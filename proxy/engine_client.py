"""httpx's client for calls to engines, without what these have no use for.

Cookies, redirects, hooks and merged settings take a multiple of what a call itself does; most of what an idle
proxy spent went there, into probes.
"""

from functools import lru_cache
from typing import Any

import httpx

from proxy.engine_connection import ConnectionBroken, NotConnected
from proxy.engine_transport import Answer, EngineTransport, Origin, as_httpx, origin_of
from proxy.engine_waits import Patience
from settings.secret_keys import SecretKeys

NO_TIMEOUT = httpx.Timeout(None)


class EngineClient(httpx.AsyncClient):
    """Requests go to the transport as they are, with the service token that is valid now."""

    def __init__(self, transport: httpx.AsyncBaseTransport, service_token: SecretKeys) -> None:
        # Proxies named in the environment are for the outside world, never for engines.
        super().__init__(transport=transport, trust_env=False, follow_redirects=False)
        self._engines = transport
        self._service_token = service_token

    def build_request(
        self,
        method: str,
        url: httpx.URL | str,
        **options: Any,  # noqa: ANN401 - as httpx has them
    ) -> httpx.Request:
        """Takes `content`, `headers` and `timeout`."""
        headers = dict(options.get("headers") or {})
        if self._service_token.is_required:
            headers["authorization"] = f"Bearer {self._service_token.first()}"
        timeout = options.get("timeout")
        if not isinstance(timeout, httpx.Timeout):
            timeout = NO_TIMEOUT
        return httpx.Request(
            method,
            _url(str(url)),
            headers=headers,
            content=options.get("content"),
            extensions={"timeout": timeout.as_dict()},
        )

    async def send(
        self,
        request: httpx.Request,
        *,
        stream: bool = False,
        **options: Any,  # noqa: ANN401 - as httpx has them
    ) -> httpx.Response:
        response = await self._engines.handle_async_request(request)
        response.request = request
        if not stream:
            try:
                await response.aread()
            finally:
                await response.aclose()
        return response

    async def get(  # type: ignore[override]
        self,
        url: httpx.URL | str,
        *,
        timeout: httpx.Timeout = NO_TIMEOUT,  # noqa: ASYNC109 - as httpx has it
    ) -> httpx.Response:
        """Every engine is asked three things a second: no more of httpx than its answer."""
        if not isinstance(self._engines, EngineTransport):
            return await super().get(url, timeout=timeout)
        origin, head, request = _getting(str(url))
        try:
            answer = await self._engines.whole(
                origin, self._authorized(head) + b"\r\n", connect_timeout_s=timeout.connect
            )
        except NotConnected as error:
            raise as_httpx(error, request) from error.__cause__
        except ConnectionBroken as error:
            raise httpx.RemoteProtocolError(str(error), request=request) from error
        return httpx.Response(
            answer.head.status, headers=answer.head.headers, content=answer.content, request=request
        )

    async def post_json(
        self, url: str, content: bytes, patience: Patience, *, connect_timeout_s: float
    ) -> Answer:
        """Without httpx's objects, which cost more than all else in a request: `EngineTransport.whole`."""
        assert isinstance(self._engines, EngineTransport)
        origin, head = _posting(url)
        request = b"%bcontent-length: %d\r\n\r\n%b" % (self._authorized(head), len(content), content)
        return await self._engines.whole(
            origin, request, connect_timeout_s=connect_timeout_s, patience=patience
        )

    def _authorized(self, head: bytes) -> bytes:
        if not self._service_token.is_required:
            return head
        return head + f"authorization: Bearer {self._service_token.first()}\r\n".encode()


@lru_cache(maxsize=1024)
def _posting(text: str) -> tuple[Origin, bytes]:
    url = httpx.URL(text)
    lines = (
        b"POST %b HTTP/1.1" % url.raw_path,
        b"host: " + url.netloc,
        b"content-type: application/json",
        b"",
    )
    return origin_of(url), b"\r\n".join(lines)


@lru_cache(maxsize=1024)
def _getting(text: str) -> tuple[Origin, bytes, httpx.Request]:
    url = httpx.URL(text)
    head = b"GET %b HTTP/1.1\r\nhost: %b\r\n" % (url.raw_path, url.netloc)
    return origin_of(url), head, httpx.Request("GET", url)


@lru_cache(maxsize=1024)
def _url(text: str) -> httpx.URL:
    """Few are asked for again and again."""
    return httpx.URL(text)
