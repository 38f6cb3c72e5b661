"""What a request held is freed when it ends, however it ends: it does not wait for the garbage collector.

A client that was given up holds up to --client-backlog-bytes, and the collector takes its time: with a
thousand of them everything that they had not read stayed until the next thousand came.
"""

import asyncio
import gc
from collections.abc import Iterator
from itertools import count

import pytest

from proxy.endpoint import _Exchange
from proxy.event_writer import EventWriter
from tests.proxy.builders import Stack, ids, stack, until
from tests.proxy.mock_engines import Call, MockEngine
from tests.proxy.test_cancellation import RawClient

LIMIT_BYTES = 20_000


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def generates_for_ever(call: Call) -> None:
    await call.accept()
    for step in count():
        await call.tokens(step * 512, ids("s") * 512)
        await asyncio.sleep(0.002)


async def generates_three(call: Call) -> None:
    await call.accept()
    await call.tokens(0, ids("abc"), finish_reason="length")
    await call.end()


async def _reads_to_the_end(client: RawClient, running: Stack) -> None:
    await client.read_until(b"[DONE]")


async def _leaves(client: RawClient, running: Stack) -> None:
    await client.read_until(b"data: ")
    await client.leave()


async def _reads_nothing(client: RawClient, running: Stack) -> None:
    await running.engines[0].call()


ENDS = {
    "read to the end": (generates_three, _reads_to_the_end),
    "left": (generates_for_ever, _leaves),
    "given up": (generates_for_ever, _reads_nothing),
}


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("has_link", [False, True])
@pytest.mark.parametrize("name", ENDS)
async def test_what_a_stream_held_is_freed_when_it_ends(name: str, has_link: bool) -> None:
    script, end = ENDS[name]
    engine = MockEngine("normal", script, has_link=has_link)
    async with stack(engine, client_backlog_bytes=LIMIT_BYTES) as running:
        client = await RawClient.connect(running, reads_ahead=name != "given up")
        try:
            client.post(stream=True)
            await end(client, running)
            await until(lambda: bool(engine.calls) and running.services.draining.num_open_requests == 0)
            await until(lambda: _num_held() == 0)
        finally:
            await client.leave()


def _num_held() -> int:
    # Not `isinstance`, which asks objects of other packages for their class.
    return sum(type(one) in (EventWriter, _Exchange) for one in gc.get_objects())
