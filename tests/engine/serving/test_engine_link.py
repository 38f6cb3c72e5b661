"""Streams of one engine process: ordered, separate, aborted when abandoned, failed when it is lost."""

import msgspec
import pytest

from engine.ipc import Abort, RequestFailure, RequestOutput, Withdraw
from engine.serving.engine_link import EngineLink
from engine.serving.errors import EngineRefused, EngineUnavailable, InvalidRequest
from tests.engine.serving.builders import add, token_output
from tests.engine.serving.conftest import ScriptedEngine
from wire.services import ServiceError

Pair = tuple[EngineLink, ScriptedEngine]


async def test_each_stream_gets_its_own_outputs_in_order(link_and_engine: Pair) -> None:
    link, engine = link_and_engine
    with link.open_stream(add("a")) as first, link.open_stream(add("b")) as second:
        await engine.send_outputs(token_output("b", 0), token_output("a", 0))
        await engine.send_outputs(token_output("a", 1, is_last=True), token_output("b", 1, is_last=True))
        assert [output.tokens[0].index async for output in first] == [0, 1]
        assert [output.tokens[0].index async for output in second] == [0, 1]
    assert link.num_open_streams == 0


async def test_a_finished_stream_sends_no_abort_and_an_abandoned_one_does(link_and_engine: Pair) -> None:
    link, engine = link_and_engine
    with link.open_stream(add("a")) as stream:
        await engine.send_outputs(token_output("a", 0, is_last=True))
        await stream.next()
    with link.open_stream(add("b")):
        pass
    commands = [await engine.command() for _ in range(3)]
    assert commands == [add("a"), add("b"), Abort("b")]


async def test_a_choice_that_ends_does_not_end_the_stream_and_the_requests_last_output_does(
    link_and_engine: Pair,
) -> None:
    link, engine = link_and_engine
    with link.open_stream(add("a")) as stream:
        first, second = (RequestOutput(request_id="a", choice=c, finish_reason="length") for c in (1, 0))
        await engine.send_outputs(first, msgspec.structs.replace(second, is_last=True))
        assert [output.choice async for output in stream] == [1, 0]
    with link.open_stream(add("b")):
        pass
    assert [await engine.command() for _ in range(3)] == [add("a"), add("b"), Abort("b")]


async def test_a_withdrawal_reaches_the_engine(link_and_engine: Pair) -> None:
    link, engine = link_and_engine
    link.withdraw("h")
    assert await engine.command() == Withdraw("h")


async def test_a_failed_request_raises_the_engines_status(link_and_engine: Pair) -> None:
    link, engine = link_and_engine
    failure = RequestFailure(409, ServiceError(message="block_size differs", type="invalid_request_error"))
    with link.open_stream(add("a")) as stream:
        await engine.send_outputs(RequestOutput(request_id="a", failure=failure, is_last=True))
        with pytest.raises(EngineRefused, match="block_size differs") as refused:
            await stream.next()
    assert refused.value.status == 409


async def test_losing_the_engine_fails_every_open_stream(link_and_engine: Pair) -> None:
    link, _ = link_and_engine
    with link.open_stream(add("a")) as first, link.open_stream(add("b")) as second:
        link.fail_all("the engine process ended with code -9")
        for stream in (first, second):
            with pytest.raises(EngineUnavailable, match="code -9"):
                await stream.next()


async def test_outputs_of_a_departed_client_are_dropped(link_and_engine: Pair) -> None:
    link, engine = link_and_engine
    with link.open_stream(add("a")):
        pass
    with link.open_stream(add("b")) as stream:
        await engine.send_outputs(token_output("a", 0), token_output("b", 0, is_last=True))
        assert (await stream.next()).request_id == "b"


async def test_a_request_id_in_use_is_refused(link_and_engine: Pair) -> None:
    link, _ = link_and_engine
    with link.open_stream(add("a")), pytest.raises(InvalidRequest, match="'a'"), link.open_stream(add("a")):
        pass
