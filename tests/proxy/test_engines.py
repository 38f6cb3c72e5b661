"""The directory of engines over a scripted HTTP transport."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import httpx
import msgspec
import pytest

from proxy.engines import MAX_FAILED_PROBES, Engine, EngineDirectory
from tests.proxy.mock_engines import MockEngine
from wire.services import EngineInfo

INFO = MockEngine("prompt", lambda call: asyncio.sleep(0)).info
Handler = Callable[[httpx.Request], httpx.Response]


class Fleet:
    """A directory of prompt engines whose answers the test sets by host name; rounds start on demand."""

    def __init__(self, *hosts: str) -> None:
        self.handlers: dict[str, Handler] = {host: ready(INFO) for host in hosts}
        http = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        urls = [f"http://{host}" for host in hosts]
        self.directory = EngineDirectory(http, {"prompt": urls}, model="tiny", refresh_s=3600)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        return self.handlers[request.url.host](request)

    @property
    def engine(self) -> Engine:
        return self.directory.snapshot().engines[0]

    async def probed(self) -> Engine:
        """The first engine after one more round of questions."""
        watched = self.directory._watched[0]
        watched.engine = await self.directory._probe(watched)
        return watched.engine

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.directory.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def ready(info: EngineInfo) -> Handler:
    def answer(request: httpx.Request) -> httpx.Response:
        content = msgspec.json.encode(info) if request.url.path == "/info" else b"{}"
        return httpx.Response(200, content=content)

    return answer


def draining(grace_left_s: float) -> Handler:
    content = msgspec.json.encode({"status": "draining", "grace_left_s": grace_left_s})
    return lambda request: httpx.Response(503, content=content)


async def test_an_engine_that_drains_says_how_long_it_stays_and_a_started_one_stays() -> None:
    fleet = Fleet("a")
    assert (await fleet.probed()).is_routable
    fleet.handlers["a"] = draining(30.0)
    first = await fleet.probed()
    assert (first.is_routable, first.problem) == (False, "draining")
    assert first.leaves_at_s is not None
    fleet.handlers["a"] = draining(29.0)
    assert await fleet.probed() == first
    fleet.handlers["a"] = ready(replace(INFO, epoch=INFO.epoch + 1))
    assert (await fleet.probed()).leaves_at_s is None


async def test_an_engine_that_drains_tells_by_its_link_before_it_is_asked() -> None:
    fleet = Fleet("a")
    await fleet.probed()
    fleet.directory.leaves("http://a", 30.0)
    assert (fleet.engine.is_routable, fleet.engine.problem) == (False, "draining")
    fleet.directory.leaves("http://unknown", 30.0)


def status(code: int) -> Handler:
    return lambda request: httpx.Response(code, content=b"{}")


def failing(error: Exception) -> Handler:
    def answer(request: httpx.Request) -> httpx.Response:
        raise error

    return answer


async def test_an_engine_is_routable_once_it_has_said_who_and_how_it_is() -> None:
    fleet = Fleet("a")
    assert not fleet.engine.is_routable
    assert await fleet.probed() == Engine(url="http://a", role="prompt", info=INFO, is_ready=True, problem="")


async def test_an_engine_that_says_it_is_not_ready_gets_nothing_at_once() -> None:
    fleet = Fleet("a")
    await fleet.probed()
    fleet.handlers["a"] = status(503)
    assert not (await fleet.probed()).is_routable
    fleet.handlers["a"] = ready(INFO)
    assert (await fleet.probed()).is_routable


async def test_a_restart_is_noticed_by_its_epoch() -> None:
    fleet = Fleet("a")
    await fleet.probed()
    fleet.handlers["a"] = ready(replace(INFO, epoch=2))
    restarted = await fleet.probed()
    assert restarted.info is not None
    assert restarted.info.epoch == 2


async def test_one_failed_probe_ejects_nobody_but_several_in_a_row_do() -> None:
    fleet = Fleet("a")
    await fleet.probed()
    fleet.handlers["a"] = failing(httpx.ReadTimeout("slow"))
    states = [(await fleet.probed()).is_routable for _ in range(MAX_FAILED_PROBES)]
    assert states == [True] * (MAX_FAILED_PROBES - 1) + [False]


async def test_failed_probes_must_follow_each_other() -> None:
    fleet = Fleet("a")
    for _ in range(MAX_FAILED_PROBES):
        fleet.handlers["a"] = ready(INFO)
        assert (await fleet.probed()).is_routable
        fleet.handlers["a"] = failing(httpx.ReadTimeout("slow"))
        assert (await fleet.probed()).is_routable


async def test_a_refused_connection_ejects_at_once() -> None:
    fleet = Fleet("a")
    await fleet.probed()
    fleet.handlers["a"] = failing(httpx.ConnectError("refused"))
    assert not (await fleet.probed()).is_routable


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        (replace(INFO, model="other"), "serves model 'other', this proxy serves 'tiny'"),
        (replace(INFO, role="completion"), "is a completion engine, configured as --prompt-url"),
        (replace(INFO, control_address=None), "has no control address for hand-overs"),
    ],
)
async def test_a_wrong_engine_is_never_routable(info: EngineInfo, problem: str) -> None:
    fleet = Fleet("a")
    fleet.handlers["a"] = ready(info)
    engine = await fleet.probed()
    assert (engine.is_routable, engine.problem) == (False, problem)


async def test_nonsense_from_an_engine_is_a_failed_probe() -> None:
    fleet = Fleet("a")
    fleet.handlers["a"] = status(200)
    assert "ValidationError" in (await fleet.probed()).problem


async def test_an_engine_that_never_answers_delays_no_other() -> None:
    fleet = Fleet("slow", "fast")

    class Silent(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.host == "slow":
                await asyncio.Event().wait()
            return fleet.handlers["fast"](request)

    fleet.directory._http = httpx.AsyncClient(transport=Silent())
    async with fleet.running(), asyncio.timeout(1):
        while not fleet.directory.snapshot().engines[1].is_routable:
            await fleet.directory.wait_for_change()


async def test_a_suspected_engine_is_asked_at_once() -> None:
    fleet = Fleet("a")
    async with fleet.running(), asyncio.timeout(5):
        while not fleet.engine.is_routable:
            await fleet.directory.wait_for_change()
        fleet.handlers["a"] = status(503)
        fleet.directory.suspect(fleet.engine)
        while fleet.engine.is_routable:
            await fleet.directory.wait_for_change()


async def test_a_lost_engine_gets_nothing_until_it_answers_again() -> None:
    fleet = Fleet("a")
    async with fleet.running(), asyncio.timeout(5):
        while not fleet.engine.is_routable:
            await fleet.directory.wait_for_change()
        fleet.directory.lost(fleet.engine)
        assert not fleet.engine.is_routable
        while not fleet.engine.is_routable:
            await fleet.directory.wait_for_change()
