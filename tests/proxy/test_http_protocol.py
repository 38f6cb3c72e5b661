"""Heads of responses leave with what follows them in the same turn, and never wait for longer."""

import asyncio
from typing import Any

from proxy.asgi import Receive, Scope, Send
from proxy.http_protocol import EXCHANGE, HeadsWait
from tests.proxy.mock_engines import serving

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Written(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[bytes] = []
        self._is_closing = False

    def is_closing(self) -> bool:
        return self._is_closing

    def write(self, data: Any) -> None:
        self.parts.append(data)

    def close(self) -> None:
        self.parts.append(b"closed")

    def abort(self) -> None:
        self._is_closing = True


async def test_a_head_leaves_with_the_body_that_follows_at_once() -> None:
    written = Written()
    transport = HeadsWait(written)
    for part in (HEAD, b"a", b"b"):
        transport.write(part)
    await asyncio.sleep(0)
    assert written.parts == [HEAD + b"a", b"b"]


async def test_a_head_alone_leaves_at_the_end_of_the_turn_and_before_the_connection_is_closed() -> None:
    written = Written()
    transport = HeadsWait(written)
    transport.write(HEAD)
    assert written.parts == []
    await asyncio.sleep(0)
    assert written.parts == [HEAD]
    transport.write(HEAD)
    transport.close()
    await asyncio.sleep(0)
    assert written.parts == [HEAD, HEAD, b"closed"]


async def test_nothing_is_written_to_a_connection_that_was_cut() -> None:
    written = Written()
    transport = HeadsWait(written)
    transport.write(HEAD)
    written.abort()
    await asyncio.sleep(0)
    assert written.parts == []


async def test_answers_to_pipelined_requests_keep_their_order() -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        content = scope["path"].encode()
        headers = [(b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["path"] == "/late":
            await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": content})

    async with serving(answer) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"".join(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path for path in (b"/late", b"/soon")))
        async with asyncio.timeout(5):
            received = [await reader.readuntil(path) for path in (b"/late", b"/soon")]
        writer.close()
    assert [one.count(b"HTTP/1.1 200 OK") for one in received] == [1, 1]


async def test_parts_are_written_at_once_behind_the_head_and_in_order() -> None:
    written: list[bool] = []

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        write = scope["extensions"][EXCHANGE].write
        written.append(write(b"too early"))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        written.append(write(b"the head waits"))
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        written.append(write(b"bc"))
        await send({"type": "http.response.body", "body": b"d"})

    async with serving(answer) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(5):
            received = await reader.readuntil(b"0\r\n\r\n")
        writer.close()
    assert written == [False, False, True]
    assert received.endswith(b"\r\n\r\n1\r\na\r\n2\r\nbc\r\n1\r\nd\r\n0\r\n\r\n")


async def test_the_end_of_a_connection_is_told_once_also_where_it_came_before_the_question() -> None:
    left: list[str] = []
    asked, told, finished = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        on_left = scope["extensions"][EXCHANGE].on_left
        on_left(lambda: (left.append("first"), told.set()))
        asked.set()
        await told.wait()
        told.clear()
        on_left(lambda: (left.append("late"), told.set()))
        await told.wait()
        on_left(None)
        finished.set()

    async with serving(answer) as url:
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(5):
            await asked.wait()
            writer.close()
            await finished.wait()
    assert left == ["first", "late"]
