"""Links that cannot be opened, and links that bring more than the proxy can pass on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import pytest

from proxy.engine_waits import EngineWaits
from proxy.errors import EngineUnreachable
from proxy.fleet import Engine
from proxy.leg_batch import LegBatch
from proxy.response_parser import ResponseParser
from proxy.token_link import TokenLink, TokenLinks
from settings.secret_keys import SecretKeys
from tests.proxy.builders import until
from tests.proxy.mock_engines import MockEngine
from wire.sampling import SamplingParams
from wire.services import CompletionRequest
from wire.token_link import CloseStream, FrameSplitter, OpenStream, StreamPart, decode_to_service, frame

INFO = MockEngine("completion", lambda call: asyncio.sleep(0), has_link=True).info
ENGINE = Engine(url="http://127.0.0.1", role="completion", info=INFO, is_ready=True, problem="")
REQUEST = CompletionRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1))


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Connecting takes for ever; one entry each."""
    begun: list[None] = []

    async def create_connection(*args: Any, **options: Any) -> NoReturn:
        begun.append(None)
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", create_connection)
    return begun


async def test_streams_share_one_attempt_to_connect_and_its_failure(attempts: list[None]) -> None:
    waits = EngineWaits()
    links = TokenLinks(waits, SecretKeys(), connect_timeout_s=0.2)
    async with asyncio.timeout(4):
        failures = await asyncio.gather(
            *(links.open(ENGINE, REQUEST) for _ in range(20)), return_exceptions=True
        )
    assert {type(failure) for failure in failures} == {EngineUnreachable}
    assert len({id(failure) for failure in failures}) == 20, "each client's failure gets headers of its own"
    assert (len(attempts), waits.num_waits) == (1, 0)


async def test_who_waits_for_a_link_is_freed_when_the_engine_is_given_up(attempts: list[None]) -> None:
    waits = EngineWaits()
    links = TokenLinks(waits, SecretKeys(), connect_timeout_s=60.0)
    opening = [asyncio.create_task(links.open(ENGINE, REQUEST)) for _ in range(2)]
    await until(lambda: bool(attempts))
    waits.give_up(ENGINE)
    async with asyncio.timeout(4):
        failures = await asyncio.gather(*opening, return_exceptions=True)
    assert {type(failure) for failure in failures} == {EngineUnreachable}
    links.close()


class FakeTransport(asyncio.Transport):
    """Keeps what is written; nothing is read."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.reads = True
        self.was_aborted = False

    def write(self, data: Any) -> None:
        self.written.append(data)

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def abort(self) -> None:
        self.was_aborted = True


def chunk(*parts: StreamPart) -> bytes:
    data = frame(list(parts))
    return b"%x\r\n%b\r\n" % (len(data), data)


def tokens(number: int, first: int, num: int) -> list[StreamPart]:
    return [StreamPart(number, first_index=index, token_ids=(7,)) for index in range(first, first + num)]


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@contextlib.asynccontextmanager
async def linked() -> AsyncIterator[tuple[TokenLink, FakeTransport, list[LegBatch]]]:
    """A link with one stream, which was accepted, and what that stream was given."""
    link, transport, taken = TokenLink(b"", lambda leaves_in_s: None), FakeTransport(), list[LegBatch]()
    link.connection_made(transport)
    leg = link.open(ENGINE, REQUEST, EngineWaits())
    link.data_received(HEAD + chunk(StreamPart(1, is_accepted=True)))

    def take(batch: LegBatch) -> bool:
        taken.append(batch)
        return batch.failure is None

    forwarding = asyncio.create_task(leg.forward(take, 60.0))
    await asyncio.sleep(0)
    yield link, transport, taken
    link.close("the test is over")
    await forwarding


def indices(taken: list[LegBatch]) -> list[int]:
    return [token.index for batch in taken for part in batch.parts.values() for token in part.tokens]


async def test_a_flood_is_passed_on_over_many_turns_and_nothing_more_is_read_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proxy.token_link.TURN_S", 0.0)
    async with linked() as (link, transport, taken):
        link.data_received(chunk(*tokens(1, 0, 3)) + chunk(*tokens(1, 3, 2)))
        assert indices(taken) == [0, 1], "the first, which waits for nobody, and that of this turn"
        assert not transport.reads
        for num_turns in range(3):
            assert len(taken) == 2 + num_turns
            await asyncio.sleep(0)
        assert indices(taken) == [0, 1, 2, 3, 4]
        assert transport.reads


async def test_what_has_been_read_is_passed_on_before_the_end_of_the_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proxy.token_link.TURN_S", 0.0)
    async with linked() as (link, _, taken):
        link.data_received(chunk(*tokens(1, 0, 4)))
        assert len(taken) == 2
        link.connection_lost(None)
        assert indices(taken) == [0, 1, 2, 3]
        assert taken[-1].failure is not None


async def test_what_begins_a_stream_does_not_wait_behind_the_tokens_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proxy.token_link.TURN_S", 0.0)
    async with linked() as (link, _, taken):
        new = link.open(ENGINE, REQUEST, EngineWaits())
        link.data_received(chunk(*tokens(1, 0, 5)) + chunk(StreamPart(2, is_accepted=True), *tokens(2, 0, 2)))
        assert indices(taken) == [0, 1]
        await new.accepted(1.0)
        firsts = await new.next_batch(1.0)
        assert indices([firsts]) == [0]
        await until(lambda: len(taken) == 5)
        assert indices([await new.next_batch(1.0)]) == [1]
        await new.close()


async def test_tokens_of_a_stream_that_was_left_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.token_link.TURN_S", 0.0)
    async with linked() as (link, transport, taken):
        gone = link.open(ENGINE, REQUEST, EngineWaits())
        link.data_received(chunk(*tokens(2, 0, 1), *tokens(1, 0, 2)))
        await gone.close()
        await asyncio.sleep(0)
        assert transport.written[-1].endswith(frame(CloseStream(2)) + b"\r\n")
        await until(lambda: transport.reads)
        assert indices(taken) == [0, 1]
        assert link.num_streams == 1


async def test_a_part_that_makes_no_sense_ends_the_link_and_its_streams() -> None:
    async with linked() as (link, transport, taken):
        with pytest.raises(IndexError):
            link.data_received(chunk(StreamPart(1, token_ids=(7, 8), logprobs=(None,))))
        assert link.is_closed
        assert transport.was_aborted
        assert taken[-1].failure is not None


async def test_what_a_turn_has_to_say_leaves_as_one_write_in_order() -> None:
    async with linked() as (link, transport, _):
        num_before = len(transport.written)
        legs = [link.open(ENGINE, REQUEST, EngineWaits()) for _ in range(3)]
        await legs[0].close()
        assert len(transport.written) == num_before
        await asyncio.sleep(0)
        (written,) = transport.written[num_before:]
        parser = ResponseParser()
        body = parser.feed(HEAD + written)
        opened, closed = [], []
        for data in FrameSplitter().push(body):
            match decode_to_service(data):
                case OpenStream(number):
                    opened.append(number)
                case CloseStream(number):
                    closed.append(number)
        assert (opened, closed) == ([2, 3, 4], [2])
