"""A token link between the real service's application and the proxy's end of it; the engine is the test's."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from completion_service.app import create_app, engine_request
from completion_service.token_link import LinkSession
from engine.ipc import Abort, AddRequest
from engine.serving.engine_link import EngineLink
from engine.serving.errors import EngineUnavailable
from engine.serving.metrics import ServiceMetrics
from engine.serving.service_token import ServiceTokenCheck
from engine.serving.settings import EngineServiceSettings
from engine.serving.supervisor import EngineSupervisor
from proxy.engine_waits import EngineWaits
from proxy.errors import EngineBroke, EngineFailure, EngineUnreachable
from proxy.fleet import Engine
from proxy.leg_batch import LegBatch
from proxy.linked_leg import LinkedLeg
from proxy.token_link import TokenLinks
from settings.secret_keys import SecretKeys
from tests.engine.serving.builders import ready, token_output
from tests.engine.serving.conftest import ScriptedEngine
from tests.proxy.builders import until
from tests.proxy.mock_engines import serving
from wire.sampling import SamplingParams
from wire.services import CompletionRequest
from wire.token_link import FrameSplitter, FrameTooLong, StreamPart, decode_to_proxy, frame, open_stream_frame


@dataclass
class Service:
    """The application, its supervisor, and links to it."""

    supervisor: EngineSupervisor
    engine: Engine
    links: TokenLinks

    async def open(self, request_id: str, **fields: object) -> LinkedLeg:
        request = CompletionRequest(
            request_id=request_id, prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=4)
        )
        return await self.links.open(self.engine, replace(request, **fields))


NO_TOKEN = SecretKeys()


@asynccontextmanager
async def service(
    link: EngineLink,
    wanted: SecretKeys = NO_TOKEN,
    shown: SecretKeys = NO_TOKEN,
    on_leaving: Callable[[str, float], None] = lambda url, leaves_in_s: None,
) -> AsyncIterator[Service]:
    supervisor = EngineSupervisor(EngineServiceSettings(), "normal")
    supervisor._link, supervisor.engine, supervisor.state = link, ready(), "ready"
    app = create_app("normal", supervisor, 1000)
    app.add_middleware(ServiceTokenCheck, tokens=wanted)
    async with serving(app) as url:
        links = TokenLinks(EngineWaits(), shown, connect_timeout_s=5.0, on_leaving=on_leaving)
        yield Service(supervisor, Engine(url=url, role="normal"), links)
        links.close()


async def token_ids(leg: LinkedLeg) -> list[int]:
    """Everything the leg brings to its end."""
    ids: list[int] = []

    def take(batch: LegBatch) -> bool:
        for part in batch.parts.values():
            ids.extend(token.token_id for token in part.tokens)
        if batch.failure is not None:
            raise batch.failure
        return not any(part.finish_reason for part in batch.parts.values())

    async with asyncio.timeout(10):
        await leg.forward(take, 10.0)
    return ids


async def test_the_tokens_of_many_streams_come_over_one_connection(
    link_and_engine: tuple[EngineLink, ScriptedEngine],
) -> None:
    link, engine = link_and_engine
    async with service(link) as running:
        legs = [await running.open(str(number)) for number in range(5)]
        for leg in legs:
            await leg.accepted(5.0)
        requests = [await engine.command() for _ in legs]
        assert all(isinstance(request, AddRequest) for request in requests)
        for index in range(4):
            await engine.send_outputs(
                *(token_output(str(number), index, is_last=index == 3) for number in range(5))
            )
        assert [await token_ids(leg) for leg in legs] == [[10, 11, 12, 13]] * 5
        for leg in legs:
            await leg.drain()
        running.links.check_invariants()
        assert link.num_open_streams == 0


async def test_leaving_a_stream_aborts_its_request_and_no_other(
    link_and_engine: tuple[EngineLink, ScriptedEngine],
) -> None:
    link, engine = link_and_engine
    async with service(link) as running:
        left, kept = await running.open("left"), await running.open("kept")
        await left.accepted(5.0)
        await kept.accepted(5.0)
        assert [type(await engine.command()) for _ in range(2)] == [AddRequest] * 2
        await left.close()
        assert await engine.command() == Abort("left", keeps_handover=True)
        await engine.send_outputs(token_output("left", 0), token_output("kept", 0, is_last=True))
        assert await token_ids(kept) == [10]


async def test_a_refused_request_ends_its_own_stream(
    link_and_engine: tuple[EngineLink, ScriptedEngine],
) -> None:
    link, engine = link_and_engine
    async with service(link) as running:
        good = await running.open("good")
        for bad, status in (
            (await running.open("long", prompt_token_ids=(1,) * 20), 400),
            (await running.open("good"), 400),
        ):
            with pytest.raises(EngineFailure) as refused:
                await bad.accepted(5.0)
            assert (refused.value.status, refused.value.was_taken) == (status, False)
        await good.accepted(5.0)
        running.supervisor.state = "lost"
        with pytest.raises(EngineFailure, match="the engine is lost"):
            await (await running.open("late")).accepted(5.0)
        await engine.command()
        await engine.send_outputs(token_output("good", 0, is_last=True))
        assert await token_ids(good) == [10]


async def test_a_lost_engine_fails_its_streams(link_and_engine: tuple[EngineLink, ScriptedEngine]) -> None:
    link, _ = link_and_engine
    async with service(link) as running:
        leg = await running.open("a")
        await leg.accepted(5.0)
        link.fail_all("the engine process ended")
        with pytest.raises(EngineFailure) as lost:
            await token_ids(leg)
        assert (lost.value.status, lost.value.error.code) == (503, "engine_lost")


async def test_a_broken_link_fails_its_streams_aborts_their_requests_and_is_opened_again(
    link_and_engine: tuple[EngineLink, ScriptedEngine],
) -> None:
    link, engine = link_and_engine
    async with service(link) as running:
        leg = await running.open("a")
        await leg.accepted(5.0)
        assert isinstance(await engine.command(), AddRequest)
        running.links.close()
        with pytest.raises(EngineBroke):
            await token_ids(leg)
        assert await engine.command() == Abort("a", keeps_handover=True)
        again = await running.open("b")
        await again.accepted(5.0)


async def test_a_draining_service_closes_the_link_once_its_streams_have_ended(
    link_and_engine: tuple[EngineLink, ScriptedEngine],
) -> None:
    link, engine = link_and_engine
    async with service(link) as running:
        leg = await running.open("a")
        await leg.accepted(5.0)
        running.supervisor.drain(30.0)
        await engine.command()
        await engine.send_outputs(token_output("a", 0, is_last=True))
        assert await token_ids(leg) == [10]
        (only,) = running.links._links.values()
        await until(lambda: only.is_closed)


async def test_a_draining_service_closes_the_link_behind_the_last_frame_of_many(
    monkeypatch: pytest.MonkeyPatch, link_and_engine: tuple[EngineLink, ScriptedEngine]
) -> None:
    monkeypatch.setattr("completion_service.token_link.MAX_FRAME_PARTS", 1)
    link, engine = link_and_engine
    async with service(link) as running:
        leg = await running.open("a")
        await leg.accepted(5.0)
        running.supervisor.drain(30.0)
        await engine.command()
        await engine.send_outputs(*(token_output("a", index, is_last=index == 3) for index in range(4)))
        assert await token_ids(leg) == [10, 11, 12, 13]


async def test_what_begins_a_stream_is_in_the_next_frame_whatever_waits_of_others(
    monkeypatch: pytest.MonkeyPatch, link_and_engine: tuple[EngineLink, ScriptedEngine]
) -> None:
    """Nobody reads these two streams' frames: the test takes them as the connection would."""
    monkeypatch.setattr("completion_service.token_link.MAX_FRAME_PARTS", 3)
    link, engine = link_and_engine
    supervisor = EngineSupervisor(EngineServiceSettings(), "normal")

    def check(request: CompletionRequest) -> tuple[EngineLink, AddRequest]:
        return link, engine_request(request)

    metrics = ServiceMetrics("normal", supervisor)
    session = LinkSession(check, metrics, with_cached_tokens=False)

    async def opened(number: int) -> None:
        sampling = SamplingParams(max_tokens=9)
        request = CompletionRequest(request_id=str(number), prompt_token_ids=(1,), sampling=sampling)
        (data,) = FrameSplitter().push(open_stream_frame(number, request))
        session.take(data)
        assert isinstance(await engine.command(), AddRequest)

    await opened(1)
    await engine.send_outputs(*(token_output("1", index) for index in range(6)))
    await until(lambda: len(session._pending) == 5)
    await opened(2)
    await engine.send_outputs(*(token_output("2", index) for index in range(2)))
    await until(lambda: len(session._pending) == 6)
    await opened(3)
    session._streams[3].put(EngineUnavailable("it died"))
    frames = [
        [(part.stream, part.is_accepted, part.token_ids) for part in await session.next_parts()]
        for _ in range(4)
    ]
    assert frames == [
        [(1, True, ()), (1, False, (10,)), (2, True, ()), (2, False, (10,)), (3, True, ()), (3, False, ())],
        [(1, False, (11,)), (1, False, (12,)), (1, False, (13,))],
        [(1, False, (14,)), (1, False, (15,)), (2, False, (11,))],
        [],
    ]
    session.close()


async def test_a_service_that_drains_says_so_over_its_links_at_once(
    link_and_engine: tuple[EngineLink, ScriptedEngine],
) -> None:
    link, engine = link_and_engine
    heard: asyncio.Queue[tuple[str, float]] = asyncio.Queue()
    async with service(link, on_leaving=lambda *what: heard.put_nowait(what)) as running:
        leg = await running.open("a")
        await leg.accepted(5.0)
        running.supervisor.drain(30.0)
        url, leaves_in_s = await asyncio.wait_for(heard.get(), 4.0)
        assert url == running.engine.url
        assert 20.0 < leaves_in_s <= 30.0
        late = await running.open("late")
        with pytest.raises(EngineFailure) as refused:
            await late.accepted(5.0)
        assert (refused.value.kind, refused.value.was_taken) == ("draining", False)
        await engine.command()
        await engine.send_outputs(token_output("a", 0, is_last=True))
        assert await token_ids(leg) == [10]


@pytest.mark.parametrize(("shown", "is_taken"), [("right", True), ("wrong", False)])
async def test_a_link_shows_the_service_token(
    link_and_engine: tuple[EngineLink, ScriptedEngine], shown: str, is_taken: bool
) -> None:
    link, _ = link_and_engine
    async with service(link, SecretKeys(["right"]), SecretKeys([shown])) as running:
        leg = await running.open("a")
        if is_taken:
            await leg.accepted(5.0)
            return
        with pytest.raises(EngineBroke, match="refused with status 401"):
            await leg.accepted(5.0)


async def test_a_proxy_that_reads_nothing_is_given_up_and_its_parts_are_bounded(
    monkeypatch: pytest.MonkeyPatch, link_and_engine: tuple[EngineLink, ScriptedEngine]
) -> None:
    monkeypatch.setattr("completion_service.token_link.MAX_PENDING_PARTS", 3)
    link, engine = link_and_engine
    async with service(link) as running:
        leg = await running.open("a")
        await leg.accepted(5.0)
        await engine.command()
        # In one message, which is one turn of the event loop: nothing can be written in between.
        await engine.send_outputs(*(token_output("a", index) for index in range(4)))
        with pytest.raises(EngineBroke):
            await token_ids(leg)
        assert await engine.command() == Abort("a", keeps_handover=True)


async def test_an_engine_that_is_not_there_is_unreachable() -> None:
    links = TokenLinks(EngineWaits(), NO_TOKEN, connect_timeout_s=1.0)
    request = CompletionRequest(request_id="a", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1))
    with pytest.raises(EngineUnreachable):
        await links.open(Engine(url="http://127.0.0.1:9", role="normal"), request)


def test_frames_survive_any_cutting_and_too_long_ones_are_refused() -> None:
    messages = [[StreamPart(number, token_ids=(number,) * number)] for number in range(5)]
    data = b"".join(frame(message) for message in messages)
    for size in (1, 3, 7, len(data)):
        splitter = FrameSplitter()
        found = [
            list(decode_to_proxy(piece))
            for start in range(0, len(data), size)
            for piece in splitter.push(data[start : start + size])
        ]
        assert found == messages
    with pytest.raises(FrameTooLong):
        list(FrameSplitter().push(b"\xff\xff\xff\xff"))
