"""Every wait for an engine: each has its own time-out, and all those on one engine can be ended together."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from proxy.errors import EngineTooSlow
from proxy.fleet import Engine

ResultT = TypeVar("ResultT")


class EngineWaits:
    """Knows who waits for what engine."""

    def __init__(self) -> None:
        self._waits: defaultdict[str, set[asyncio.Timeout]] = defaultdict(set)
        self._futures: dict[asyncio.Future[Any], tuple[Engine, float | None]] = {}
        """Waits for a future need no time-out of their own: it can be told itself."""

    def on(self, engine: Engine, timeout_s: float | None) -> "EngineWait":
        """A context that raises `TimeoutError` after `timeout_s`, or as soon as the engine is given up."""
        return EngineWait(self, engine.url, timeout_s)

    def begin(self, url: str, wait: asyncio.Timeout) -> None:
        self._waits[url].add(wait)

    def end(self, url: str, wait: asyncio.Timeout) -> None:
        waits = self._waits[url]
        waits.discard(wait)
        if not waits:
            del self._waits[url]  # engines come and go, and their addresses with them

    async def within(self, timeout_s: float | None, engine: Engine, work: Awaitable[ResultT]) -> ResultT:
        """The result of `work`; `EngineTooSlow` where it does not come."""
        try:
            async with self.on(engine, timeout_s):
                return await work
        except TimeoutError:
            raise too_slow(engine, timeout_s) from None

    def patience(self, engine: Engine, timeout_s: float | None) -> "Patience":
        """The same wait again and again."""
        return Patience(self, engine, timeout_s)

    async def for_future(
        self, timeout_s: float | None, engine: Engine, awaited: asyncio.Future[ResultT]
    ) -> ResultT:
        """As `within`, for a future that nobody else waits for."""
        self._futures[awaited] = engine, timeout_s
        timer = None if timeout_s is None else awaited.get_loop().call_later(timeout_s, self._end, awaited)
        try:
            return await awaited
        finally:
            del self._futures[awaited]
            if timer is not None:
                timer.cancel()

    def _end(self, awaited: asyncio.Future[Any]) -> None:
        if not awaited.done():
            awaited.set_exception(too_slow(*self._futures[awaited]))

    def give_up(self, engine: Engine) -> None:
        """The engine answers nothing any more: whoever waits for it has waited long enough."""
        for awaited in [one for one, (of, _) in self._futures.items() if of.url == engine.url]:
            self._end(awaited)
        now_s = asyncio.get_running_loop().time()
        for wait in self._waits.get(engine.url, ()):
            if not wait.expired():
                wait.reschedule(now_s)

    @property
    def num_waits(self) -> int:
        return len(self._futures) + sum(map(len, self._waits.values()))


class Patience(msgspec.Struct, frozen=True):
    """With one engine, so long each time."""

    waits: EngineWaits
    engine: Engine
    timeout_s: float | None

    def within(self, work: Awaitable[ResultT]) -> Coroutine[None, None, ResultT]:
        return self.waits.within(self.timeout_s, self.engine, work)

    def for_future(self, awaited: asyncio.Future[ResultT]) -> Coroutine[None, None, ResultT]:
        return self.waits.for_future(self.timeout_s, self.engine, awaited)


class EngineWait:
    """One wait; where a new time can be set for it."""

    def __init__(self, waits: EngineWaits, url: str, timeout_s: float | None) -> None:
        self._waits = waits
        self._url = url
        self._timeout = asyncio.timeout(timeout_s)

    async def __aenter__(self) -> asyncio.Timeout:
        await self._timeout.__aenter__()
        self._waits.begin(self._url, self._timeout)
        return self._timeout

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._waits.end(self._url, self._timeout)
        await self._timeout.__aexit__(kind, error, traceback)


def too_slow(engine: Engine, timeout_s: float | None) -> EngineTooSlow:
    how_long = "" if timeout_s is None else f" for {timeout_s:g} s"
    return EngineTooSlow(engine.role, f"the {engine.role} engine said nothing{how_long}")
