"""The proxy as a process: start, drain, exit status."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial

import httpx
import pytest

from tests.ports import free_port
from tests.proxy.builders import events, until
from tests.proxy.mock_engines import Call, MockEngine, serving

pytestmark = pytest.mark.system

MODEL = "smollm2-135m-instruct"


@dataclass
class RunningProxy:
    process: Process
    client: httpx.AsyncClient
    finish: asyncio.Event
    """Lets the engine end its stream."""

    async def ready(self) -> None:
        await self.client.get("/health/live")  # waits until the process listens
        await until(partial(self.has_health, 200))

    async def has_health(self, status: int) -> bool:
        return (await self.client.get("/health")).status_code == status


@contextlib.asynccontextmanager
async def proxy_process(*flags: str) -> AsyncIterator[RunningProxy]:
    """A real proxy in front of a NORMAL engine that sends one token and then waits for `finish`."""
    finish = asyncio.Event()

    async def script(call: Call) -> None:
        await call.accept()
        await call.tokens(0, [100], num_cached_tokens=0)
        await finish.wait()
        await call.tokens(1, [101], finish_reason="length")
        await call.end()

    engine = MockEngine("normal", script)
    engine.info = replace(engine.info, model=MODEL)
    port = free_port()
    async with serving(engine) as url, httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", trust_env=False, transport=retrying(), timeout=30
    ) as client:  # fmt: skip
        arguments = ("-m", "proxy", "--port", str(port), "--normal-url", url, "--refresh-s", "0.1", *flags)
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stderr=PIPE)
        running = RunningProxy(process, client, finish)
        try:
            await running.ready()
            yield running
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()


def retrying() -> httpx.AsyncBaseTransport:
    class UntilItListens(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            async with asyncio.timeout(30):
                while True:
                    try:
                        return await super().handle_async_request(request)
                    except httpx.ConnectError:
                        await asyncio.sleep(0.05)

    return UntilItListens(trust_env=False)


BODY = {"model": MODEL, "prompt": "hi", "stream": True}


async def test_sigterm_turns_it_unready_refuses_new_requests_and_lets_streams_finish() -> None:
    async with proxy_process() as running:
        async with running.client.stream("POST", "/v1/completions", json=BODY) as response:
            body = response.aiter_text()
            received = await anext(body)
            assert "date" in response.headers
            running.process.send_signal(signal.SIGTERM)
            await until(partial(running.has_health, 503))
            assert (await running.client.get("/health")).json()["status"] == "draining"
            refused = await running.client.post("/v1/completions", json=BODY)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            running.finish.set()
            received += "".join([text async for text in body])
        assert events(received)[-1] == "[DONE]"
        async with asyncio.timeout(20):
            assert await running.process.wait() == 0


async def test_kept_connections_end_when_it_drains_and_later_ones_with_their_answer() -> None:
    async with proxy_process() as running:
        url = running.client.base_url
        async with running.client.stream("POST", "/v1/completions", json=BODY) as response:
            body = response.aiter_text()  # kept: the stream would end with it, and the proxy be idle
            await anext(body)
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(b"GET /health/live HTTP/1.1\r\nhost: proxy\r\n\r\n")
            assert b"connection: close" not in await reader.readuntil(b'alive"}')
            running.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(20):
                assert await reader.read() == b""
            writer.close()
            refused = await running.client.post("/v1/completions", json=BODY)
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            running.finish.set()


async def test_a_stream_that_outlives_the_grace_ends_with_an_error_frame() -> None:
    async with proxy_process("--grace-s", "0.2") as running:
        async with running.client.stream("POST", "/v1/completions", json=BODY) as response:
            body = response.aiter_text()
            received = await anext(body)
            running.process.send_signal(signal.SIGTERM)
            received += "".join([text async for text in body])
        *_, error, done = events(received)
        assert json.loads(error)["error"]["code"] == "shutting_down"
        assert done == "[DONE]"
        async with asyncio.timeout(20):
            assert await running.process.wait() == 0


async def test_an_idle_proxy_exits_at_once_with_status_0() -> None:
    async with proxy_process() as running:
        running.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await running.process.wait() == 0


async def started_with(*flags: str, **environment: str) -> tuple[int, str]:
    """Exit status and stderr of a start that must fail."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", *flags, stderr=PIPE, env={**os.environ, **environment}
    )
    async with asyncio.timeout(30):
        _, stderr = await process.communicate()
    assert process.returncode is not None
    return process.returncode, stderr.decode()


async def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, stderr = await started_with("--port", str(port))
    assert code == 1
    assert stderr.count("\n") == 1
    assert str(port) in stderr
    assert "--port" in stderr


async def test_an_unknown_model_is_one_line() -> None:
    code, stderr = await started_with("--model", "no-such-model")
    assert code == 1
    assert stderr.count("\n") == 1
    assert "no-such-model" in stderr


async def test_an_unknown_variable_is_one_line() -> None:
    code, stderr = await started_with(TANDEM_PROXY_PROTM_URL="http://a")
    assert code == 2
    assert stderr.count("\n") == 1
    assert "TANDEM_PROXY_PROTM_URL" in stderr
