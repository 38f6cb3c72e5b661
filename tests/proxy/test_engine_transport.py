"""Connections to engines, against a bare TCP server whose every byte the test decides."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

import httpx
import pytest

from proxy.engine_client import EngineClient
from proxy.engine_connection import MAX_BUFFERED_BYTES, ConnectionBroken, EngineConnection, NotConnected
from proxy.engine_transport import MAX_ERROR_BYTES, Answer, EngineTransport
from proxy.engine_waits import EngineWaits
from proxy.errors import EngineTooSlow
from proxy.fleet import Engine
from settings.secret_keys import SecretKeys
from tests.proxy.builders import until

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]


class Server:
    """Counts the connections it gets; `peer` speaks on each of them."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.num_connections = 0
        self.num_closed = 0
        self.url = ""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self.peer(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        self.num_closed += 1


@contextlib.asynccontextmanager
async def serving(
    peer: Peer, idle_s: float = 60
) -> AsyncIterator[tuple[Server, EngineTransport, httpx.AsyncClient]]:
    handler = Server(peer)
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    handler.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    transport = EngineTransport(idle_s=idle_s)
    async with httpx.AsyncClient(transport=transport, base_url=handler.url) as client:
        try:
            yield handler, transport, client
            transport.check_invariants()
        finally:
            await client.aclose()
            server.close()
            await server.wait_closed()
            await until(lambda: handler.num_closed == handler.num_connections)


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
    )
    return head + await reader.readexactly(length)


def always(response: bytes) -> Peer:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(response)

    return peer


async def test_a_request_reaches_the_engine_and_its_answer_comes_back() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_request(reader)
        writer.write(b"HTTP/1.1 418 T\r\ncontent-length: %d\r\nx: y\r\n\r\n%s" % (len(request), request))

    async with serving(echo) as (_, _, client):
        response = await client.post("/path?q=1", content=b"body")
    assert response.status_code == 418
    assert response.headers["x"] == "y"
    assert response.content.startswith(b"POST /path?q=1 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert response.content.endswith(b"\r\n\r\nbody")


async def test_requests_one_after_another_use_one_connection() -> None:
    async with serving(always(OK)) as (server, transport, client):
        for _ in range(200):
            assert (await client.get("/")).text == "ok"
        assert (server.num_connections, transport.num_connections) == (1, 1)


async def test_requests_at_once_use_a_connection_each_and_keep_them() -> None:
    async with serving(always(OK)) as (server, _, client):
        for _ in range(3):
            await asyncio.gather(*(client.get("/") for _ in range(10)))
        assert server.num_connections <= 10


async def test_an_idle_connection_that_is_too_old_is_not_used() -> None:
    async with serving(always(OK), idle_s=0) as (server, _, client):
        await client.get("/")
        await asyncio.sleep(0.001)  # the clock of real sockets
        await client.get("/")
        assert server.num_connections == 2


async def test_an_idle_connection_that_the_engine_closed_is_not_used() -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)

    async with serving(once) as (server, transport, client):
        for number in range(5):
            assert (await client.get("/")).text == "ok"
            await until(lambda number=number: server.num_closed == number + 1)
            idle = next(iter(transport._idle.values()))
            await until(lambda idle=idle: not idle[-1][0].is_idle)
        assert server.num_connections == 5


@pytest.mark.parametrize(
    "head",
    [b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok", b"HTTP/1.0 200 OK\r\n\r\nok"],
)
async def test_a_connection_that_ends_with_its_response_is_not_kept(head: bytes) -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(head)

    async with serving(once) as (_, transport, client):
        assert (await client.get("/")).text == "ok"
        assert transport.num_connections == 0


async def test_closing_a_response_early_closes_the_connection_at_once() -> None:
    left = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        await reader.read()
        left.set()

    async with serving(endless) as (_, transport, client):
        async with client.stream("GET", "/") as response:
            assert await anext(response.aiter_raw()) == b"a"
        async with asyncio.timeout(4):
            await left.wait()
        assert transport.num_connections == 0


async def test_cancelling_before_the_answer_closes_the_connection_at_once() -> None:
    arrived, left = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        arrived.set()
        await reader.read()
        left.set()

    async with serving(silent) as (_, transport, client):
        request = asyncio.create_task(client.get("/"))
        await arrived.wait()
        request.cancel()
        async with asyncio.timeout(4):
            await left.wait()
        await asyncio.gather(request, return_exceptions=True)
        assert transport.num_connections == 0


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nok"]
)
async def test_an_answer_that_is_cut_short_or_no_http_is_a_protocol_error(answer: bytes) -> None:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)

    async with serving(peer) as (_, transport, client):
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/")
        assert transport.num_connections == 0


async def test_an_unreachable_engine_is_a_connect_error() -> None:
    async with httpx.AsyncClient(transport=EngineTransport(idle_s=1)) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get("http://127.0.0.1:1/")


async def test_a_reader_that_does_not_read_pauses_the_engine() -> None:
    is_paused = asyncio.Event()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n\r\n")
        for _ in range(100):
            writer.write(b"x" * 1_000_000)
            if writer.transport.get_write_buffer_size() > 20_000_000:
                is_paused.set()
            await writer.drain() if not is_paused.is_set() else None
        await writer.drain()

    async with serving(flood) as (_, transport, client), client.stream("GET", "/") as response:
        (connection,) = transport._in_use
        await until(lambda: connection._is_paused)
        assert connection._num_buffered < MAX_BUFFERED_BYTES * 4
        num_bytes = 0
        async for chunk in response.aiter_raw():
            num_bytes += len(chunk)
        assert num_bytes == 100_000_000


async def test_closing_the_transport_closes_every_connection() -> None:
    async with serving(always(OK)) as (server, transport, client):
        await client.get("/")
        await transport.aclose()
        await until(lambda: server.num_closed == 1)
        assert transport.num_connections == 0


async def test_the_client_sends_requests_as_they_are_with_the_service_token() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(302, headers={"location": "/else", "set-cookie": "a=b"}, content=b"no")

    async with EngineClient(httpx.MockTransport(answer), SecretKeys(["token"])) as http:
        for _ in range(2):
            answered = await http.get("http://engine/info?a=b", timeout=httpx.Timeout(None, connect=0.5))
            assert (answered.status_code, answered.content, answered.is_closed) == (302, b"no", True)
            assert answered.request is seen[-1]
    assert [str(request.url) for request in seen] == ["http://engine/info?a=b"] * 2
    assert all(request.headers["authorization"] == "Bearer token" for request in seen)
    assert all("cookie" not in request.headers for request in seen)
    assert seen[0].extensions["timeout"]["connect"] == 0.5


class PausingTransport(asyncio.Transport):
    """Notes whether it is to read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = True

    def write(self, data: object) -> None: ...

    def abort(self) -> None: ...

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


async def test_a_connection_whose_long_answer_came_at_once_reads_on() -> None:
    """uvloop reads several times in a turn: the answer is complete when reading pauses."""
    connection, transport = EngineConnection(), PausingTransport()
    connection.connection_made(transport)
    exchange = asyncio.create_task(connection.exchange(b"request"))
    await asyncio.sleep(0)
    length = MAX_BUFFERED_BYTES + 1000
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % length + b"a" * (length - 1))
    connection.data_received(b"a")
    await exchange
    assert not transport.reads
    assert connection.whole_body() is None
    assert not connection.is_idle
    assert await connection.read() == b"a" * length
    assert await connection.read() is None
    assert (transport.reads, connection.is_idle) == (True, True)


@contextlib.asynccontextmanager
async def posting(
    peer: Peer, timeout_s: float = 30.0, tokens: Sequence[str] = ()
) -> AsyncIterator[tuple[Server, Callable[[bytes], Coroutine[None, None, Answer]]]]:
    """Calls without httpx's objects."""
    waits = EngineWaits()
    async with serving(peer) as (server, transport, _):
        patience = waits.patience(Engine(url=server.url, role="prompt"), timeout_s)
        client = EngineClient(transport, SecretKeys(tokens))

        def post(content: bytes) -> Coroutine[None, None, Answer]:
            url = server.url + "/v1/prompt?a=b"
            return client.post_json(url, content, patience, connect_timeout_s=10.0)

        yield server, post
        assert waits.num_waits == 0


async def test_a_posted_body_reaches_the_engine_with_the_service_token_over_one_connection() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await read_request(reader)
            writer.write(b"HTTP/1.1 201 C\r\nx: y\r\ncontent-length: %d\r\n\r\n%b" % (len(request), request))

    async with posting(echo, tokens=["token"]) as (server, post):
        for _ in range(20):
            answer = await post(b'{"a": 1}')
        assert server.num_connections == 1
        host = server.url.removeprefix("http://").encode()
    assert (answer.head.status, answer.head.header(b"x")) == (201, b"y")
    assert answer.content == (
        b"POST /v1/prompt?a=b HTTP/1.1\r\nhost: " + host + b"\r\ncontent-type: application/json\r\n"
        b'authorization: Bearer token\r\ncontent-length: 8\r\n\r\n{"a": 1}'
    )


async def test_a_connection_goes_on_behind_an_answer_that_had_to_stop_it_for_a_while() -> None:
    size = 3 * MAX_BUFFERED_BYTES
    large = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (size, b"x" * size)
    async with posting(always(large)) as (server, post), asyncio.timeout(20):
        for _ in range(5):
            assert len((await post(b"{}")).content) == size
        assert server.num_connections == 1


async def test_of_an_error_that_is_endless_only_the_beginning_is_read() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 500 No\r\n\r\n")
        while True:
            writer.write(b"x" * 4096)
            await writer.drain()

    async with posting(endless) as (server, post), asyncio.timeout(20):
        answer = await post(b"{}")
        assert answer.head.status == 500
        assert len(answer.content) > MAX_ERROR_BYTES
        await until(lambda: server.num_closed == 1)


async def test_a_posted_request_whose_answer_breaks_off_fails_and_keeps_no_connection() -> None:
    async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK[:-1])

    async with posting(breaks) as (server, post):
        for _ in range(2):
            with pytest.raises(ConnectionBroken, match="in the middle"):
                await post(b"{}")
        assert server.num_connections == 2


@pytest.mark.parametrize("beginning", [b"", OK[:-1]])
async def test_silence_ends_a_posted_request_wherever_it_begins(beginning: bytes) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(beginning)
        await reader.read()

    async with posting(silent, timeout_s=0.05) as (server, post):
        with pytest.raises(EngineTooSlow, match=r"said nothing for 0\.05 s"):
            await post(b"{}")
        await until(lambda: server.num_closed == 1)


async def test_a_posted_request_that_is_given_up_closes_its_connection() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        asked.set()
        await reader.read()

    asked = asyncio.Event()
    async with posting(silent) as (server, post):
        posted = asyncio.create_task(post(b"{}"))
        await asked.wait()
        posted.cancel()
        await asyncio.gather(posted, return_exceptions=True)
        await until(lambda: server.num_closed == 1)


async def test_where_nobody_listens_no_connection_comes_about() -> None:
    async with posting(always(OK)) as (_, post):
        pass
    with pytest.raises(NotConnected) as failed:
        await post(b"{}")
    assert not failed.value.is_slow
