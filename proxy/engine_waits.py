"""Every wait for an engine: each has its own time-out, and all those on one engine can be ended together."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

from proxy.engines import Engine
from proxy.errors import EngineTooSlow

ResultT = TypeVar("ResultT")


class EngineWaits:
    """Knows who waits for what engine."""

    def __init__(self) -> None:
        self._waits: defaultdict[str, set[asyncio.Timeout]] = defaultdict(set)

    @asynccontextmanager
    async def on(self, engine: Engine, timeout_s: float | None) -> AsyncIterator[asyncio.Timeout]:
        """Raises `TimeoutError` after `timeout_s`, or as soon as the engine is given up."""
        waits = self._waits[engine.url]
        async with asyncio.timeout(timeout_s) as wait:
            waits.add(wait)
            try:
                yield wait
            finally:
                waits.discard(wait)
                if not waits and self._waits.get(engine.url) is waits:
                    del self._waits[engine.url]  # engines come and go, and their addresses with them

    async def within(self, timeout_s: float | None, engine: Engine, work: Awaitable[ResultT]) -> ResultT:
        """The result of `work`; `EngineTooSlow` where it does not come."""
        try:
            async with self.on(engine, timeout_s):
                return await work
        except TimeoutError:
            raise too_slow(engine, timeout_s) from None

    def give_up(self, engine: Engine) -> None:
        """The engine answers nothing any more: whoever waits for it has waited long enough."""
        now_s = asyncio.get_running_loop().time()
        for wait in self._waits.get(engine.url, ()):
            if not wait.expired():
                wait.reschedule(now_s)

    @property
    def num_waits(self) -> int:
        return sum(map(len, self._waits.values()))


def too_slow(engine: Engine, timeout_s: float | None) -> EngineTooSlow:
    how_long = "" if timeout_s is None else f" for {timeout_s:g} s"
    return EngineTooSlow(engine.role, f"the {engine.role} engine said nothing{how_long}")
