"""Asks engines what has changed in their prefix caches; at most one question per engine is under way."""

import asyncio
from collections.abc import Callable, Sequence

import httpx
import msgspec

from proxy.engines import EngineDirectory
from proxy.fleet import Engine, EngineStart
from wire.cache import CacheEvent, CacheEvents

TIMEOUT_S = 2.0
SAYS_NOTHING_S = 30.0
"""An engine that has answered something else than its events is asked again after this time."""


class CacheReader:
    """Keeps each engine's place in its own events; `run` until cancelled."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        directory: EngineDirectory,
        on_events: Callable[[Engine, Sequence[CacheEvent]], None],
        *,
        refresh_s: float,
    ) -> None:
        self._http = http
        self._directory = directory
        self._on_events = on_events
        self._refresh_s = refresh_s
        self._next: dict[EngineStart, int] = {}
        self._not_before_s: dict[EngineStart, float] = {}

    async def run(self) -> None:
        while True:
            await self.read_all()
            await asyncio.sleep(self._refresh_s)

    async def read_all(self) -> None:
        """One question to every engine that is ready and has something to tell."""
        engines = [engine for engine in self._directory.snapshot().engines if engine.is_routable]
        self._next = {engine.start: self._next.get(engine.start, 0) for engine in engines}
        now_s = asyncio.get_running_loop().time()
        self._not_before_s = {start: at_s for start, at_s in self._not_before_s.items() if at_s > now_s}
        engines = [engine for engine in engines if engine.start not in self._not_before_s]
        await asyncio.gather(*(self._read(engine) for engine in engines))

    async def _read(self, engine: Engine) -> None:
        """An engine that tells nothing is none the worse for it: the index then knows what it was sent."""
        start = engine.start
        query = f"epoch={start.epoch}&after={self._next[start]}"
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._http.get(f"{engine.url}/v1/cache/events?{query}")
            if answer.status_code >= 500:
                return
            news = _decoder.decode(answer.content)
        except (httpx.HTTPError, TimeoutError):
            return
        except msgspec.MsgspecError:
            self._not_before_s[start] = asyncio.get_running_loop().time() + SAYS_NOTHING_S
            return
        if news.epoch == start.epoch:
            self._next[start] = news.next_event
            self._on_events(engine, news.events)


_decoder = msgspec.json.Decoder(CacheEvents)
