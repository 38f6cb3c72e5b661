"""R13 over a token link: what an engine says outside the protocol is 502, or an error frame behind tokens."""

import asyncio
import json

import msgspec
import pytest

from tests.proxy.builders import Answering, events, ids, stack
from tests.proxy.mock_engines import Call, MockEngine, Script
from wire.services import ServiceError
from wire.token_link import StreamPart, frame


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


NONSENSE = {
    "no msgpack": _framed(b"\xc1\xc1\xc1"),
    "half a part": _framed(b"\x91\x95\x01"),
    "another type": _framed(msgspec.msgpack.encode({"stream": 1})),
    "a token that is a text": _framed(msgspec.msgpack.encode([[1, 0, 1, ["x"]]])),
    "a frame without end": b"\xff\xff\xff\xff",
}
FIRST = "a"


async def first_token(call: Call) -> None:
    await call.first_token(ids(FIRST)[0])


def saying(data: bytes, num_tokens: int) -> Script:
    """So many good tokens, then this."""

    async def script(call: Call) -> None:
        await call.accept()
        for index in range(1, 1 + num_tokens):
            await call.tokens(index, ids("b"))
        await call.write(data)
        await asyncio.Event().wait()

    return script


@pytest.mark.parametrize("name", NONSENSE)
async def test_a_link_outside_the_protocol_is_502_and_the_next_one_serves(name: str) -> None:
    answering = Answering("abc")
    completion = MockEngine("completion", saying(NONSENSE[name], 0), has_link=True)
    async with stack(MockEngine("prompt", first_token), completion) as running:
        async with asyncio.timeout(5):
            broken = await running.complete()
        assert (broken.status_code, broken.json()["error"]["code"]) == (502, "engine_failed")
        running.services.calls.check_invariants()
        completion.script = answering.completion
        assert (await running.complete()).json()["choices"][0]["text"] == "abc"
        assert completion.num_links == 2, "the broken one is closed"


@pytest.mark.parametrize("name", NONSENSE)
async def test_a_link_that_leaves_the_protocol_behind_tokens_is_one_error_frame(name: str) -> None:
    completion = MockEngine("completion", saying(NONSENSE[name], 3), has_link=True)
    async with stack(MockEngine("prompt", first_token), completion) as running:
        async with asyncio.timeout(5):
            streamed = await running.complete(stream=True)
        *chunks, error, done = events(streamed.text)
        texts = [json.loads(chunk)["choices"][0]["text"] for chunk in chunks]
        assert "".join(texts) == FIRST + "bbb"
        assert (json.loads(error)["error"]["code"], done) == ("engine_failed", "[DONE]")
        running.services.calls.check_invariants()


GOES_WRONG = {
    "a gap": StreamPart(1, first_index=2, token_ids=(7,)),
    "a choice nobody asked for": StreamPart(1, choice=1, first_index=1, token_ids=(7,)),
    "an error": StreamPart(1, error=ServiceError(message="lost", type="server_error", code="engine_failed")),
}


@pytest.mark.parametrize("name", GOES_WRONG)
async def test_a_stream_of_a_link_that_goes_wrong_is_502_and_the_others_go_on(name: str) -> None:
    completion = MockEngine("completion", saying(frame([GOES_WRONG[name]]), 0), has_link=True)
    answering = Answering("abc")
    may_end = asyncio.Event()

    async def waits(call: Call) -> None:
        await call.accept()
        await may_end.wait()
        await call.tokens(1, answering.ids[1:], finish_reason="stop")

    async with stack(MockEngine("prompt", first_token), completion) as running:
        async with asyncio.timeout(5):
            broken = await running.complete()
            assert (broken.status_code, broken.json()["error"]["code"]) == (502, "engine_failed")
            completion.script = waits
            other = asyncio.create_task(running.complete())
            await completion.call(1)
            may_end.set()
            assert (await other).json()["choices"][0]["text"] == "abc"
        assert completion.num_links == 1
        running.services.calls.check_invariants()
