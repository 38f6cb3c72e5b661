"""Events go out in order and at once; a client that does not read is given up, its memory bounded."""

import asyncio

import pytest

from proxy.event_writer import EventWriter
from proxy.native.loading import IS_COMPILED, Outlet


class Connection:
    """Keeps what was sent; accepts it only while it is open."""

    def __init__(self) -> None:
        self.parts: list[tuple[bytes, bool]] = []
        self.open = asyncio.Event()
        self.open.set()

    async def send(self, data: bytes, is_last: bool) -> None:
        await self.open.wait()
        self.parts.append((data, is_last))


def writer(connection: Connection, *, limit: int = 100, stall_s: float = 5.0) -> EventWriter:
    gave_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    return EventWriter(connection.send, gave_up, max_backlog_bytes=limit, stall_timeout_s=stall_s)


async def test_events_go_out_one_by_one_while_the_client_reads() -> None:
    connection = Connection()
    events = writer(connection)
    for data in (b"a", b"b"):
        events.put(data)
        await asyncio.sleep(0)
    await events.end()
    assert connection.parts == [(b"a", False), (b"b", False), (b"", True)]


async def test_what_is_put_in_one_turn_goes_out_as_one_part_without_a_task() -> None:
    connection = Connection()
    events = writer(connection)
    for data in (b"a", b"b", b"c"):
        events.put(data)
    num_tasks = len(asyncio.all_tasks())
    await asyncio.sleep(0)
    assert connection.parts == [(b"abc", False)]
    assert len(asyncio.all_tasks()) == num_tasks
    await events.end()
    assert connection.parts[1:] == [(b"", True)]


async def test_a_connection_that_fails_is_given_up() -> None:
    async def fail(data: bytes, is_last: bool) -> None:
        if data == b"later":
            await asyncio.sleep(0)
        raise RuntimeError("broken")

    for data in (b"at once", b"later"):
        gave_up = asyncio.get_running_loop().create_future()
        events = EventWriter(fail, gave_up, max_backlog_bytes=100, stall_timeout_s=5.0)
        events.put(data)
        async with asyncio.timeout(4):
            await gave_up
            await events.end()
        await events.close()


async def test_what_waits_for_a_client_goes_out_as_one_part_with_the_end() -> None:
    connection = Connection()
    events = writer(connection)
    connection.open.clear()
    events.put(b"a")
    await asyncio.sleep(0)
    events.put(b"b")
    events.put(b"c")
    ending = asyncio.create_task(events.end())
    await asyncio.sleep(0)
    assert events.num_backlog_bytes == 3
    connection.open.set()
    await ending
    assert connection.parts == [(b"a", False), (b"bc", True)]
    assert events.num_backlog_bytes == 0


async def test_a_client_that_leaves_too_much_unread_is_given_up() -> None:
    connection = Connection()
    gave_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    events = EventWriter(connection.send, gave_up, max_backlog_bytes=10, stall_timeout_s=5.0)
    connection.open.clear()
    events.put(b"x" * 10)
    await asyncio.sleep(0)
    assert not gave_up.done(), "what is on its way counts too, and just fits"
    events.put(b"x")
    assert gave_up.done()
    async with asyncio.timeout(4):
        await events.end()
    await events.close()
    assert connection.parts == []


async def test_a_client_that_reads_nothing_for_long_is_given_up() -> None:
    connection = Connection()
    gave_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    events = EventWriter(connection.send, gave_up, max_backlog_bytes=10, stall_timeout_s=0.01)
    connection.open.clear()
    events.put(b"x")
    async with asyncio.timeout(4):
        await gave_up
    await events.close()


@pytest.mark.skipif(not IS_COMPILED, reason="nothing compiled")
async def test_an_outlet_is_free_only_while_nothing_waits_and_never_behind_the_end() -> None:
    connection = Connection()
    events, outlet = writer(connection), Outlet(lambda data: None)
    events.put(b"a")
    events.share(outlet)
    assert outlet.is_behind, "a is to leave first"
    await asyncio.sleep(0)
    assert not outlet.is_behind
    events.put(b"b")
    assert outlet.is_behind
    await asyncio.sleep(0)
    assert not outlet.is_behind
    await events.end()
    assert outlet.is_behind
    await events.close()
    assert outlet.is_behind
    assert [data for data, _ in connection.parts] == [b"a", b"b", b""]
