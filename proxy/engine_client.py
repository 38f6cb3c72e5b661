"""httpx's client for calls to engines, without what these have no use for.

Cookies, redirects, hooks and merged settings take a multiple of what a call itself does; most of what an idle
proxy spent went there, into probes.
"""

from functools import lru_cache
from typing import Any

import httpx

from proxy.engine_transport import Answer, EngineTransport, Origin, origin_of
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

    async def post_json(
        self, url: str, content: bytes, patience: Patience, *, connect_timeout_s: float
    ) -> Answer:
        """Without httpx's objects, which cost more than all else in a request; see `EngineTransport.post`."""
        assert isinstance(self._engines, EngineTransport)
        origin, head = _posting(url)
        if self._service_token.is_required:
            head += f"authorization: Bearer {self._service_token.first()}\r\n".encode()
        request = b"%bcontent-length: %d\r\n\r\n%b" % (head, len(content), content)
        return await self._engines.post(origin, request, patience, connect_timeout_s=connect_timeout_s)


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
def _url(text: str) -> httpx.URL:
    """Few are asked for again and again."""
    return httpx.URL(text)
