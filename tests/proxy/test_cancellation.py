"""A client that leaves at any moment: both legs are closed at once, which aborts them."""

import asyncio
import contextlib
import itertools
import json
import socket

import pytest

from proxy.asgi import Message
from proxy.endpoint import GenerationEndpoint
from proxy.generation_apis import TEXT
from tests.proxy.builders import Stack, ids, pair_stack, stack, text_body, until
from tests.proxy.mock_engines import Call, MockEngine, Script

BOTH_WAYS = pytest.mark.parametrize("is_streamed", [False, True])


async def silent(call: Call) -> None:
    await asyncio.Event().wait()


async def accepted_then_silent(call: Call) -> None:
    await call.accept()
    await silent(call)


async def first_token(call: Call) -> None:
    await call.first_token(ids("a")[0])


async def second_token_then_silent(call: Call) -> None:
    await call.accept()
    await call.tokens(1, ids("b"))
    await silent(call)


class RawClient:
    """One connection whose every byte the test decides."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, running: Stack, *, reads_ahead: bool = True) -> "RawClient":
        """A client that does not read ahead fills its few kilobytes of buffers and then the proxy's."""
        host, port = running.url.removeprefix("http://").split(":")
        connection = socket.socket()
        if not reads_ahead:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        return cls(*await asyncio.open_connection(sock=connection, limit=1 << 16 if reads_ahead else 1))

    def post(self, **fields: object) -> None:
        body = json.dumps(text_body(**fields)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def read_until(self, marker: bytes) -> bytes:
        async with asyncio.timeout(5):
            return await self.reader.readuntil(marker)

    async def leave(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


async def expect_cancelled(running: Stack) -> None:
    """Every engine that was called has lost its caller within a second, and the proxy is idle."""
    async with asyncio.timeout(4):
        for engine in running.engines:
            for call in engine.calls:
                await call.client_left.wait()
        await until(lambda: running.services.draining.num_open_requests == 0)


@BOTH_WAYS
async def test_a_client_that_leaves_in_prefill_cancels_both_legs(is_streamed: bool) -> None:
    async with pair_stack(silent, accepted_then_silent) as running:
        client = await RawClient.connect(running)
        client.post(stream=is_streamed)
        for engine in running.engines:
            await engine.call()
        await client.leave()
        await expect_cancelled(running)
        assert running.metric("tandem_proxy_cancellations_total", stage="prompt") == 1
        assert running.services.directory.snapshot().engines[0].is_routable


@BOTH_WAYS
async def test_a_client_that_leaves_after_a_body_of_many_reads_cancels_both_legs(is_streamed: bool) -> None:
    """The server stops reading at 64 KiB; that the client leaves has to be read, too."""
    async with pair_stack(silent, silent) as running:
        client = await RawClient.connect(running)
        body = json.dumps({**text_body(stream=is_streamed), "user": "x" * 300_000}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        client.write(head.encode() + b"expect: 100-continue\r\n\r\n")
        await client.read_until(b"100 Continue\r\n\r\n")
        client.write(body)
        for engine in running.engines:
            await engine.call()
        await client.leave()
        await expect_cancelled(running)


@BOTH_WAYS
async def test_a_client_that_leaves_before_the_completion_engine_has_answered(is_streamed: bool) -> None:
    async with pair_stack(silent, silent) as running:
        client = await RawClient.connect(running)
        client.post(stream=is_streamed)
        for engine in running.engines:
            await engine.call()
        await client.leave()
        await expect_cancelled(running)


async def test_a_client_that_leaves_between_the_legs_cancels_the_completion_leg() -> None:
    async with pair_stack(first_token, accepted_then_silent) as running:
        client = await RawClient.connect(running)
        client.post(stream=True)
        assert b'"text":"a"' in await client.read_until(b"\n\n\r\n")
        await client.leave()
        async with asyncio.timeout(4):
            await (await running.engines[1].call()).client_left.wait()


async def test_a_client_that_leaves_in_mid_stream_cancels_the_completion_leg() -> None:
    async with pair_stack(first_token, second_token_then_silent) as running:
        client = await RawClient.connect(running)
        client.post(stream=True)
        await client.read_until(b'"text":"b"')
        await client.leave()
        async with asyncio.timeout(4):
            await running.engines[1].calls[0].client_left.wait()
        await until(lambda: running.metric("tandem_proxy_cancellations_total", stage="completion") == 1)


async def test_a_client_that_leaves_an_unstreamed_request_in_mid_generation_cancels_it() -> None:
    has_generated = asyncio.Event()

    async def completion(call: Call) -> None:
        await call.accept()
        await call.tokens(1, ids("b"))
        has_generated.set()
        await silent(call)

    async with pair_stack(first_token, completion) as running:
        client = await RawClient.connect(running)
        client.post(stream=False)
        await has_generated.wait()
        await client.leave()
        async with asyncio.timeout(4):
            await running.engines[1].calls[0].client_left.wait()


@BOTH_WAYS
async def test_work_queued_behind_a_client_that_leaves_begins_at_once(is_streamed: bool) -> None:
    async with pair_stack(silent, accepted_then_silent, max_prompt_tokens_under_way=2) as running:
        first, second = [await RawClient.connect(running) for _ in range(2)]
        first.post(stream=is_streamed)
        await running.engines[0].call()
        second.post(stream=is_streamed)
        await until(lambda: running.services.admission.num_waiting == 1)
        assert len(running.engines[0].calls) == 1
        await first.leave()
        async with asyncio.timeout(4):
            await running.engines[0].call(1)
        await second.leave()
        await expect_cancelled(running)


async def test_a_client_that_leaves_in_the_middle_of_its_body_costs_nothing() -> None:
    async with pair_stack(silent, silent) as running:
        client = await RawClient.connect(running)
        client.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        await client.leave()
        await until(lambda: running.metric("tandem_proxy_cancellations_total", stage="preparation") == 1)
        assert not running.engines[0].calls


async def test_a_body_that_never_comes_is_given_up() -> None:
    async with pair_stack(silent, silent, body_timeout_s=0.1) as running:
        client = await RawClient.connect(running)
        client.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        assert b" 408 " in await client.read_until(b"\r\n")
        await client.leave()


async def test_a_chunked_body_over_a_small_limit_is_refused_at_once() -> None:
    body = b"5dc\r\n" + b"x" * 1500 + b"\r\n0\r\n\r\n"
    async with pair_stack(silent, silent, max_body_bytes=1000, body_timeout_s=60.0) as running:
        client = await RawClient.connect(running)
        client.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + body)
        async with asyncio.timeout(5.0):
            assert b" 413 " in await client.read_until(b"\r\n")
        await client.leave()


async def test_every_choice_of_a_left_request_is_cancelled() -> None:
    async with pair_stack(silent, accepted_then_silent) as running:
        client = await RawClient.connect(running)
        client.post(prompt=["a", "b", "c"])
        for engine in running.engines:
            await engine.call(2)
        await client.leave()
        await expect_cancelled(running)


@pytest.mark.parametrize("script", [silent, second_token_then_silent])
async def test_a_left_request_to_a_normal_engine_is_cancelled(script: Script) -> None:
    async with stack(MockEngine("normal", script)) as running:
        client = await RawClient.connect(running)
        client.post(stream=True)
        await running.engines[0].call()
        await client.leave()
        await expect_cancelled(running)


async def test_many_clients_that_leave_at_random_moments_leave_nothing_behind() -> None:
    async with pair_stack(first_token, second_token_then_silent) as running:
        clients = [await RawClient.connect(running) for _ in range(50)]
        for number, client in enumerate(clients):
            client.post(stream=number % 2 == 0)
            for _ in range(number % 7):
                await asyncio.sleep(0)
            await client.leave()
        await until(
            lambda: (
                running.services.draining.num_open_requests == 0
                and all(call.client_left.is_set() for call in running.engines[1].calls)
            )
        )
        assert (running.metric("tandem_proxy_open_requests", stream="true")) == 0


async def test_a_client_that_never_reads_is_given_up_and_slows_nobody() -> None:
    num_sent = 0

    async def completion(call: Call) -> None:
        nonlocal num_sent
        await call.accept()
        while True:
            await call.tokens(1 + num_sent, ids("x" * 50))
            num_sent += 50
            await asyncio.sleep(0)  # uvicorn swallows what is sent to a closed connection without a pause

    async with pair_stack(first_token, completion, client_stall_timeout_s=0.3) as running:
        client = await RawClient.connect(running, reads_ahead=False)
        client.post(stream=True)
        async with asyncio.timeout(20):
            await (await running.engines[1].call()).client_left.wait()
        assert num_sent < 1_000_000
        await client.leave()


class StuckReader:
    """A client of the proxy's application whose connection takes nothing."""

    def __init__(self, running: Stack) -> None:
        self._endpoint = GenerationEndpoint(TEXT, running.services)
        self._messages = [{"type": "http.request", "body": json.dumps(text_body(stream=True)).encode()}]

    async def run(self) -> None:
        await self._endpoint({"type": "http", "headers": []}, self._receive, self._send)

    async def _receive(self) -> Message:
        return self._messages.pop() if self._messages else await _never()

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            await _never()


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def test_slow_readers_delay_no_fast_one_and_are_given_up_at_their_backlog() -> None:
    async def completion(call: Call) -> None:
        await call.accept()
        if call.completion_request.prompt_token_ids == tuple(ids("fast")):
            await call.tokens(1, ids("b"), finish_reason="length")
            await call.end()
            return
        for position in itertools.count(1):
            await call.tokens(position, ids("x"))
            await asyncio.sleep(0)

    async with pair_stack(
        first_token, completion, client_backlog_bytes=20_000, connect_timeout_s=60.0
    ) as running:
        slow = [asyncio.create_task(StuckReader(running).run()) for _ in range(50)]
        async with asyncio.timeout(30):
            answers = await asyncio.gather(*(running.complete(prompt="fast") for _ in range(20)))
        assert {answer.json()["choices"][0]["text"] for answer in answers} == {"ab"}
        async with asyncio.timeout(60):
            await asyncio.gather(*slow)
        assert running.metric("tandem_proxy_cancellations_total", stage="completion") == len(slow)
