"""Engines behind DNS names: every address of a name is one engine."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from urllib.parse import urlsplit

from proxy.discovery.endpoints import Endpoint, base_url
from wire.services import EngineRole

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port → addresses; `OSError` where there is no answer."""
Place = Callable[[EngineRole, Sequence[Endpoint]], None]


class NameWatcher:
    """Resolves the names of every role again and again; `run` until cancelled."""

    def __init__(
        self,
        urls: Mapping[EngineRole, Sequence[str]],
        place: Place,
        *,
        refresh_s: float,
        resolve: Resolve | None = None,
    ) -> None:
        self._urls = urls
        self._place = place
        self._refresh_s = refresh_s
        self._resolve = resolve or resolve_name
        self._known: dict[str, tuple[str, ...]] = {}

    async def run(self) -> None:
        while True:
            for role, urls in self._urls.items():
                await self._look_up(role, urls)
            await asyncio.sleep(self._refresh_s)

    async def _look_up(self, role: EngineRole, urls: Sequence[str]) -> None:
        for url in urls:
            self._known[url] = await self._addresses(url)
        found = sorted({address for url in urls for address in self._known[url]})
        self._place(role, [Endpoint(role, address) for address in found])

    async def _addresses(self, url: str) -> tuple[str, ...]:
        """The engines' URLs behind a name. One without an address has none; what has no answer stays."""
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 80
        try:
            async with asyncio.timeout(TIMEOUT_S):
                addresses = await self._resolve(host, port)
        except (OSError, TimeoutError) as error:
            if isinstance(error, socket.gaierror) and error.errno in NO_ADDRESS:
                return ()
            logger.warning("cannot resolve %s, what is known stays: %s", host, error or "timed out")
            return self._known.get(url, ())
        return tuple(base_url(parts.scheme, address, port) for address in addresses)


NO_ADDRESS = (socket.EAI_NONAME, socket.EAI_NODATA)


async def resolve_name(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
