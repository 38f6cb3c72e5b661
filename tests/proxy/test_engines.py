"""The directory of engines over a scripted HTTP transport."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import httpx
import msgspec
import pytest

from proxy import engines
from proxy.discovery.endpoints import Endpoint
from proxy.engines import MAX_FAILED_PROBES, PROBE_TIMEOUT_S, PROBE_TIMEOUTS, EngineDirectory
from proxy.fleet import Engine
from tests.proxy.builders import until
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
        watched = next(iter(self.directory._watched.values()))
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


async def test_k5_an_engine_whose_host_is_gone_gets_nothing_after_two_probes() -> None:
    """Whatever discovery missed: asked after 1 s, 2 s of silence, 1 s, 0.9 s without a connection."""
    fleet = Fleet("a")
    await fleet.probed()
    fleet.handlers["a"] = failing(httpx.ReadTimeout("silent"))
    assert (await fleet.probed()).is_routable
    fleet.handlers["a"] = failing(httpx.ConnectTimeout("no answer"))
    assert not (await fleet.probed()).is_routable
    assert 1.0 + PROBE_TIMEOUT_S + 1.0 + (PROBE_TIMEOUTS.connect or math.inf) < 5.0


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
    async with fleet.running(), asyncio.timeout(4):
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


@pytest.mark.parametrize("error", [None, httpx.ConnectTimeout("slow"), TimeoutError()])
async def test_a_connection_that_took_too_long_is_believed_once_a_probe_fares_alike(
    error: Exception | None,
) -> None:
    """A probe over a connection that was kept has no trouble with connecting, but gets no answer."""
    fleet = Fleet("a")
    await fleet.probed()
    if error is not None:
        fleet.handlers["a"] = failing(error)
    fleet.directory.doubted(fleet.engine)
    assert fleet.engine.is_routable
    assert (await fleet.probed()).is_routable == (error is None)


async def test_a_probe_that_was_under_way_clears_no_doubt() -> None:
    fleet = Fleet("a")
    await fleet.probed()
    answer = fleet.handlers["a"]

    def doubt_and_answer(request: httpx.Request) -> httpx.Response:
        fleet.directory.doubted(fleet.engine)
        return answer(request)

    fleet.handlers["a"] = doubt_and_answer
    assert (await fleet.probed()).is_routable
    fleet.handlers["a"] = failing(TimeoutError())
    assert not (await fleet.probed()).is_routable


async def test_a_doubt_that_comes_while_a_probe_is_under_way_is_not_proved_by_it() -> None:
    fleet = Fleet("a")
    await fleet.probed()

    def doubt_and_be_silent(request: httpx.Request) -> httpx.Response:
        fleet.directory.doubted(fleet.engine)
        raise httpx.ConnectTimeout("slow")

    fleet.handlers["a"] = doubt_and_be_silent
    assert (await fleet.probed()).is_routable
    assert not (await fleet.probed()).is_routable


@pytest.mark.parametrize(
    ("name", "error"),
    [("CONNECT_TIMEOUT_S", httpx.ConnectTimeout("late")), ("PROBE_TIMEOUT_S", TimeoutError())],
)
async def test_a_time_out_far_too_late_is_this_process_own_and_counts_only_when_repeated(
    monkeypatch: pytest.MonkeyPatch, name: str, error: Exception
) -> None:
    fleet = Fleet("a")
    (watched,) = fleet.directory._watched.values()
    fleet.handlers["a"] = failing(error)
    monkeypatch.setattr(engines, name, -1.0)  # ran out a second ago
    await fleet.probed()
    assert (watched.num_failed_probes, watched.wake.is_set()) == (0, True)
    await fleet.probed()
    assert watched.num_failed_probes == 1


async def test_an_engine_that_did_not_answer_is_asked_again_soon_however_rare_the_rounds_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "RETRY_S", 0.001)
    fleet = Fleet("a")
    failures: list[Exception] = [httpx.ConnectError("refused"), httpx.ConnectTimeout("slow"), TimeoutError()]

    def answers_at_last(request: httpx.Request) -> httpx.Response:
        if failures:
            raise failures.pop()
        return ready(INFO)(request)

    fleet.handlers["a"] = answers_at_last
    async with fleet.running(), asyncio.timeout(5):
        while not fleet.engine.is_routable:
            await fleet.directory.wait_for_change()
    assert failures == []


async def test_what_an_engine_says_while_a_probe_is_under_way_is_newer() -> None:
    fleet = Fleet("a")
    drained: list[bool] = []

    def drains_meanwhile(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/info":
            fleet.handlers["a"] = answers_and_tells
            fleet.directory.leaves("http://a", 30.0)
        return ready(INFO)(request)

    def answers_and_tells(request: httpx.Request) -> httpx.Response:
        drained.append(fleet.engine.is_routable)
        return draining(30.0)(request)

    async with fleet.running(), asyncio.timeout(5):
        while not fleet.engine.is_routable:
            await fleet.directory.wait_for_change()
        fleet.handlers["a"] = drains_meanwhile
        fleet.directory.suspect(fleet.engine)
        await until(lambda: bool(drained))
    assert drained == [False]


class Placed(Fleet):
    """A fleet that discovery fills; remembers who was given up."""

    def __init__(self, *hosts: str) -> None:
        super().__init__(*hosts)
        self.given_up: list[str] = []
        http = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        self.directory = EngineDirectory(
            http, model="tiny", refresh_s=0.001, on_silent=lambda engine: self.given_up.append(engine.url)
        )

    def place(self, *places: tuple[str, str]) -> None:
        """Hosts and instances."""
        self.directory.place(
            "prompt", [Endpoint("prompt", f"http://{host}", instance) for host, instance in places]
        )

    def routable(self) -> list[str]:
        return [engine.url.removeprefix("http://") for engine in self.directory.snapshot().routable("prompt")]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await self.directory.wait_for_change()


async def test_discovery_adds_engines_and_takes_them_out_at_once() -> None:
    fleet = Placed("a", "b")
    async with fleet.running():
        fleet.place(("a", "1"))
        await fleet.until(lambda: fleet.routable() == ["a"])
        fleet.place(("a", "1"), ("b", "2"))
        await fleet.until(lambda: fleet.routable() == ["a", "b"])
        fleet.place(("b", "2"))
        assert fleet.routable() == ["b"]
        assert fleet.given_up == [], "what runs there goes on"


async def test_an_engine_that_leaves_is_asked_until_it_has_gone() -> None:
    fleet = Placed("a")
    async with fleet.running():
        fleet.place(("a", "1"))
        await fleet.until(lambda: fleet.routable() == ["a"])
        fleet.place()
        assert [engine.is_unlisted for engine in fleet.directory.snapshot().engines] == [True]
        fleet.handlers["a"] = failing(httpx.ReadTimeout("gone"))
        await fleet.until(lambda: fleet.directory.snapshot().engines == ())
        assert fleet.given_up == ["http://a", "http://a"]


async def test_an_engine_that_refuses_connections_may_still_end_its_streams() -> None:
    fleet = Placed("a")
    async with fleet.running():
        fleet.place(("a", "1"))
        await fleet.until(lambda: fleet.routable() == ["a"])
        fleet.place()
        refused = httpx.ConnectError("refused")
        refused.__cause__ = ConnectionRefusedError()
        fleet.handlers["a"] = failing(refused)
        await fleet.until(lambda: fleet.engine.info is None)
        assert fleet.given_up == []
        fleet.handlers["a"] = ready(INFO)
        fleet.place(("a", "1"))
        await fleet.until(lambda: fleet.routable() == ["a"])


async def test_an_address_that_another_engine_gets_is_a_new_engine() -> None:
    fleet = Placed("a")
    async with fleet.running():
        fleet.place(("a", "old"))
        await fleet.until(lambda: fleet.routable() == ["a"])
        old = fleet.engine
        fleet.handlers["a"] = ready(replace(INFO, epoch=2))
        fleet.place(("a", "new"))
        assert fleet.routable() == [], "not before it has said who it is"
        assert fleet.given_up == ["http://a"], "nobody waits for the old one"
        await fleet.until(lambda: fleet.routable() == ["a"])
        assert fleet.engine.start != old.start


async def test_a_leaving_engine_whose_address_answers_with_another_epoch_has_gone() -> None:
    fleet = Placed("a")
    async with fleet.running():
        fleet.place(("a", "1"))
        await fleet.until(lambda: fleet.routable() == ["a"])
        fleet.place()
        fleet.handlers["a"] = ready(replace(INFO, epoch=2))
        await fleet.until(lambda: fleet.directory.snapshot().engines == ())
        assert fleet.given_up == ["http://a"]


async def test_word_of_an_engine_that_has_gone_is_of_no_interest() -> None:
    fleet = Placed("a")
    stranger = Engine(url="http://gone", role="prompt")
    for tell in ("assigned", "answered", "suspect", "failed", "lost"):
        getattr(fleet.directory, tell)(stranger)
    assert fleet.directory.snapshot().engines == ()
