"""Very many streams at once, and the descriptors that they take."""

import asyncio
import json
import logging
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from proxy import main
from tests.proxy.builders import Answering, stack, text_body, until
from tests.proxy.mock_engines import Call, MockEngine

NUM_STREAMS = 1_000
AT_ONCE = 50


async def open_stream(url: str) -> tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask, and return with the beginning of the answer: the prompt engine's token."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    body = json.dumps(text_body(stream=True)).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return await reader.readuntil(b"data: "), reader, writer


@pytest.mark.timeout(120)
async def test_a_thousand_streams_are_open_at_once_and_all_end_well() -> None:
    answering = Answering("abc")
    all_are_here = asyncio.Event()

    async def completion(call: Call) -> None:
        await call.accept()
        await all_are_here.wait()
        await call.tokens(1, answering.ids[1:], finish_reason="stop")

    main._raise_descriptor_limit()
    engines = MockEngine("prompt", answering.prompt), MockEngine("completion", completion, has_link=True)
    async with stack(*engines, connect_timeout_s=60.0, first_byte_timeout_s=60.0) as running:
        streams = []
        for _ in range(NUM_STREAMS // AT_ONCE):
            streams += await asyncio.gather(*(open_stream(running.url) for _ in range(AT_ONCE)))
        assert running.services.draining.num_open_requests == NUM_STREAMS
        all_are_here.set()
        for head, reader, writer in streams:
            assert head.startswith(b"HTTP/1.1 200")
            answer = await reader.read()
            assert b"data: [DONE]\n\n" in answer
            assert b'"error"' not in answer
            writer.close()
        assert engines[1].num_links == 1
        await until(lambda: running.services.draining.num_open_requests == 0)
        running.services.calls.check_invariants()


@pytest.mark.parametrize(("hard", "num_streams"), [(1024, 341), (1 << 20, None)])
def test_the_descriptor_limit_is_raised_at_start_and_a_low_one_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hard: int, num_streams: int | None
) -> None:
    asked: list[tuple[int, int]] = []
    limits = SimpleNamespace(
        RLIMIT_NOFILE=7,
        RLIM_INFINITY=-1,
        getrlimit=lambda _: (256, hard),
        setrlimit=lambda _, wanted: asked.append(wanted),
    )
    monkeypatch.setattr(main, "resource", limits)
    with caplog.at_level(logging.WARNING):
        main._raise_descriptor_limit()
    assert asked == [(hard, hard)]
    told = [record.getMessage() for record in caplog.records]
    warning = f"only {hard} descriptors are allowed: about {num_streams} streams at once (ulimit -n)"
    assert told == ([] if num_streams is None else [warning])
