"""Requests that reach their endpoint without going through ASGI's layers behave like all others."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from proxy.asgi import ASGIApp, Receive, Scope, Send
from proxy.draining import ClosingConnections, Draining
from proxy.http_protocol import EXCHANGE, Headers, ServesDirectly
from tests.proxy.builders import Answering, pair_stack, text_body, until
from tests.proxy.mock_engines import serving

PATH = b"/direct"
HEAD = b"POST /direct HTTP/1.1\r\nhost: x\r\n"


class Echo(ServesDirectly):
    """Answers with the body, and remembers the way that each request took."""

    def __init__(self) -> None:
        self.ways: list[str] = []

    def direct_endpoint(self, path: bytes, headers: Headers) -> ASGIApp | None:
        return self._answer if path == PATH else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.ways.append("layers")
        await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = scope["extensions"][EXCHANGE]
        body = exchange.whole_body(100_000)
        self.ways.append("received" if body is None else "whole")
        if body is None:
            body = await _received(receive)
        is_written = exchange.respond(200, b"x-way: written\r\n", body)
        self.ways.append("written" if is_written else "sent")
        if not is_written:
            headers = [(b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})


async def _received(receive: Receive) -> bytes:
    body, message = b"", dict[str, Any](more_body=True)
    while message.get("more_body", False):
        message = dict(await receive())
        body += message["body"]
    return body


@contextlib.asynccontextmanager
async def connected(app: ASGIApp) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with serving(app) as url, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        yield reader, writer
        writer.close()


async def answered(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of a response that says how long it is."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: "))
    return head, await reader.readexactly(int(length.removeprefix(b"content-length: ")))


@pytest.mark.parametrize(
    ("request_bytes", "body", "ways"),
    [
        (HEAD + b"content-length: 5\r\n\r\nhello", b"hello", ["whole", "written"]),
        (HEAD + b"content-length: 0\r\n\r\n", b"", ["whole", "written"]),
        (
            HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
            b"hello",
            ["whole", "written"],
        ),
        (HEAD + b"content-length: 70000\r\n\r\n" + b"x" * 70_000, b"x" * 70_000, ["received", "written"]),
        (
            HEAD.replace(b"/direct", b"/direct?a=b") + b"content-length: 2\r\n\r\nhi",
            b"hi",
            ["layers", "whole", "sent"],
        ),
        (HEAD.replace(b"1.1", b"1.0") + b"content-length: 2\r\n\r\nhi", b"hi", ["layers", "whole", "sent"]),
    ],
)
async def test_a_body_and_its_answer_are_alike_on_every_way(
    request_bytes: bytes, body: bytes, ways: list[str]
) -> None:
    app = Echo()
    async with connected(app) as (reader, writer):
        writer.write(request_bytes)
        head, got = await answered(reader)
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert (got, app.ways) == (body, ways)


async def test_a_body_that_comes_in_pieces_is_awaited() -> None:
    app = Echo()
    async with connected(app) as (reader, writer):
        writer.write(HEAD + b"content-length: 4\r\n\r\nab")
        await until(lambda: bool(app.ways))
        writer.write(b"cd")
        assert (await answered(reader))[1] == b"abcd"
    assert app.ways == ["received", "written"]


async def test_a_client_is_told_to_go_on_when_it_asks_before_it_sends_its_body() -> None:
    async with connected(Echo()) as (reader, writer):
        writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"ok")
        assert (await answered(reader))[1] == b"ok"


async def test_requests_sent_ahead_are_answered_in_order_on_one_connection() -> None:
    app = Echo()
    async with connected(app) as (reader, writer):
        writer.write(b"".join(HEAD + b"content-length: 1\r\n\r\n%d" % number for number in range(5)))
        assert [(await answered(reader))[1] for _ in range(5)] == [b"%d" % number for number in range(5)]


async def test_a_connection_ends_with_the_answer_where_its_client_wants_it_so() -> None:
    async with connected(Echo()) as (reader, writer):
        writer.write(HEAD + b"connection: close\r\ncontent-length: 1\r\n\r\na")
        head, _ = await answered(reader)
        assert b"connection: close\r\n" in head
        assert await reader.read() == b""


async def test_while_it_drains_an_answer_is_the_last_on_its_connection() -> None:
    app, draining = Echo(), Draining()
    async with connected(ClosingConnections(app, draining)) as (reader, writer):
        writer.write(HEAD + b"content-length: 1\r\n\r\na")
        await answered(reader)
        draining.begin()
        writer.write(HEAD + b"content-length: 1\r\n\r\nb")
        head, body = await answered(reader)
        assert b"connection: close\r\n" in head
        assert await reader.read() == b""
    assert (body, app.ways) == (b"b", ["whole", "written", "layers", "whole", "sent"])


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_leave_nothing_behind_for_the_garbage_collector(stream: bool) -> None:
    answering, num_requests = Answering("abc", "length"), 50
    async with pair_stack(answering.prompt, answering.completion) as running:
        with _nothing_is_collected():
            for number in range(num_requests + 1):
                if number == 1:
                    gc.collect()
                answer = await running.client.post("/v1/completions", json=text_body(stream=stream))
                assert answer.status_code == 200
            in_circles = _types_in_circles()
    ours = {name for name, count in in_circles.items() if count >= num_requests}
    assert not ours & {"Client", "_Exchange", "Choice", "EventWriter", "RequestResponseCycle", "Interruption"}


@contextlib.contextmanager
def _nothing_is_collected() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _types_in_circles() -> dict[str, int]:
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        counts: dict[str, int] = {}
        for one in gc.garbage:
            counts[type(one).__name__] = counts.get(type(one).__name__, 0) + 1
        return counts
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
