"""What every transport must do, for all of them; the real ones read from a second process."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from kv_transfer.errors import ReadError, SettingsError, TransportUnavailable
from kv_transfer.layout import Region
from kv_transfer.transport import BlockRead, Connection, ReadResult, RemoteMemory, Transport
from kv_transfer.transports import make_transport
from kv_transfer.transports.fake import FakeTransport
from tests.kv_transfer.builders import BLOCK_BYTES, NUM_BLOCKS, Pool
from tests.kv_transfer.processes import REAL_TRANSPORTS, TIMEOUT_S, Peer, needs_nixl

KV, STATE = 0, 1


@contextmanager
def served_memory(name: str, num_blocks: int, block_bytes: int) -> Iterator[RemoteMemory]:
    if name != "fake":
        with Peer("memory", name, num_blocks=num_blocks, block_bytes=block_bytes) as peer:
            yield peer.memory
        return
    pool = Pool(num_blocks, block_bytes).fill()
    transport = FakeTransport()
    yield RemoteMemory(transport.register(pool.regions, "inproc://control"), pool.regions, "inproc://control")
    transport.close()


class Reading:
    """A transport with its pool and one connection to a filled source."""

    def __init__(
        self, transport: Transport, pool: Pool, memory: RemoteMemory, connection: Connection | None = None
    ) -> None:
        self.transport, self.pool, self.memory = transport, pool, memory
        self.connection: Connection = connection or transport.connect(memory)

    def start(self, remote: Sequence[int], local: Sequence[int], region: int = KV) -> int:
        return self.connection.read([blocks(remote, local, region)])

    def finish(self, num_reads: int = 1) -> list[ReadResult]:
        results: list[ReadResult] = []
        until_s = time.monotonic() + TIMEOUT_S
        while len(results) < num_reads:
            assert time.monotonic() < until_s, "the read did not end"
            results += self.connection.poll()
        return results


def blocks(remote: Sequence[int], local: Sequence[int], region: int = KV) -> BlockRead:
    return BlockRead(region, np.array(remote, dtype=np.int32), np.array(local, dtype=np.int32))


@contextmanager
def reading_from(name: str, memory: RemoteMemory, num_blocks: int, block_bytes: int) -> Iterator[Reading]:
    pool = Pool(num_blocks, block_bytes)
    transport = make_transport(name)
    transport.register(pool.regions, None)
    reading = Reading(transport, pool, memory)
    yield reading
    reading.connection.close()
    transport.close()


@contextmanager
def opened(name: str, num_blocks: int = NUM_BLOCKS, block_bytes: int = BLOCK_BYTES) -> Iterator[Reading]:
    with ExitStack() as stack:
        memory = stack.enter_context(served_memory(name, num_blocks, block_bytes))
        yield stack.enter_context(reading_from(name, memory, num_blocks, block_bytes))


@pytest.fixture(scope="module", params=["fake", *REAL_TRANSPORTS])
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    chosen: str = request.param
    with pytest.MonkeyPatch.context() as patch:
        if chosen == "nixl-tcp":
            patch.setenv("UCX_TLS", "tcp")
        yield chosen.removesuffix("-tcp")


@pytest.fixture(scope="module")
def memory(name: str) -> Iterator[RemoteMemory]:
    """A source with the builders' usual pool, shared by the tests that leave it as it was."""
    with served_memory(name, NUM_BLOCKS, BLOCK_BYTES) as served:
        yield served


@pytest.fixture
def reading(name: str, memory: RemoteMemory) -> Iterator[Reading]:
    with reading_from(name, memory, NUM_BLOCKS, BLOCK_BYTES) as opened_reading:
        yield opened_reading


def test_scattered_blocks_land_where_they_were_asked_for(reading: Reading) -> None:
    read_id = reading.start((9, 2, 3, 14), (1, 6, 5, 11))
    assert reading.finish() == [ReadResult(read_id)]
    assert reading.pool.holds((1, 6, 5, 11), (9, 2, 3, 14))


def test_consecutive_blocks_arrive_whole(reading: Reading) -> None:
    reading.start(range(2, 12), range(4, 14))
    assert reading.finish()[0].error is None
    assert reading.pool.holds(range(4, 14), range(2, 12))


def test_one_connection_may_cut_blocks_into_pieces(name: str, memory: RemoteMemory) -> None:
    pool, transport = Pool(), make_transport(name)
    transport.register(pool.regions, None)
    connection = transport.connect(
        RemoteMemory(memory.blob, quartered(memory.regions), memory.host_address), quartered(pool.regions)
    )
    reading = Reading(transport, pool, memory, connection)
    reading.start((12, 13, 14, 15, 37), (4, 5, 6, 7, 8))
    assert reading.finish()[0].error is None
    assert pool.kv[1].tolist() == [4] * BLOCK_BYTES
    assert pool.kv[2].tolist() == [10] * (BLOCK_BYTES // 4) + [0] * (BLOCK_BYTES * 3 // 4)
    connection.close()
    transport.close()


def quartered(regions: Sequence[Region]) -> tuple[Region, ...]:
    return tuple(
        Region(item.kind, item.address, item.block_bytes // 4, item.num_blocks * 4) for item in regions
    )


def test_both_regions_move_in_one_read(reading: Reading) -> None:
    reading.connection.read([blocks((3,), (4,)), blocks((2,), (1,), STATE)])
    assert reading.finish()[0].error is None
    assert reading.pool.holds((4,), (3,))
    assert reading.pool.state[:, 0].tolist() == [0, 103, 0, 0]


def test_reads_under_way_together_are_each_reported_once(reading: Reading) -> None:
    ids = [reading.start((index,), (index + 1,)) for index in range(1, 8)]
    results = reading.finish(len(ids))
    assert sorted(result.read_id for result in results) == ids
    assert reading.connection.poll() == []
    assert reading.pool.holds(range(2, 9), range(1, 8))


def test_cancelled_read_ends_and_the_next_one_works(reading: Reading) -> None:
    cancelled = reading.start(range(1, 8), range(1, 8))
    if not reading.connection.cancel(cancelled):
        assert reading.finish()[0].read_id == cancelled
    reading.pool.kv[:] = 0
    read_id = reading.start((9,), (10,))
    assert reading.finish() == [ReadResult(read_id)]
    assert reading.pool.holds((10,), (9,))


def test_cancel_of_an_ended_read_is_safe(reading: Reading) -> None:
    read_id = reading.start((1,), (1,))
    reading.finish()
    assert reading.connection.cancel(read_id)
    assert reading.connection.cancel(12345)


def test_close_is_idempotent_and_a_new_connection_works(reading: Reading) -> None:
    reading.start((1, 2), (1, 2))
    reading.connection.close()
    reading.connection.close()
    reading.pool.kv[:] = 0
    reading.connection = reading.transport.connect(reading.memory)
    reading.start((5,), (6,))
    assert reading.finish()[0].error is None
    assert reading.pool.holds((6,), (5,))


def test_nothing_lands_after_close(name: str) -> None:
    with opened(name, 257, 65536) as reading:
        reading.start(range(1, 257), range(1, 257))
        reading.connection.poll()
        reading.connection.close()
        reading.pool.kv[:] = 0
        reading.connection = reading.transport.connect(reading.memory)
        reading.start((5,), (6,))
        assert reading.finish()[0].error is None
        assert reading.pool.holds((6,), (5,))


@pytest.mark.parametrize("block_bytes", [64, 200 << 10, 256 << 10, 1 << 20, 1400 << 10])
def test_every_block_size_arrives_whole(name: str, block_bytes: int) -> None:
    remote, local = (1, 2, 3, 9, 7, 11), (8, 9, 10, 2, 1, 5)
    with opened(name, NUM_BLOCKS, block_bytes) as reading:
        reading.start(remote, local)
        assert reading.finish()[0].error is None
        assert reading.pool.holds(local, remote)


def test_thousands_of_small_blocks_arrive_whole(name: str) -> None:
    order = np.random.default_rng(0).permutation(np.arange(1, 5000)).tolist()
    with opened(name, 5000, 256) as reading:
        reading.start(order, range(1, 5000))
        assert reading.finish()[0].error is None
        assert reading.pool.holds(range(1, 5000), order)


def test_address_that_is_not_one_is_refused(reading: Reading) -> None:
    garbage = RemoteMemory(b"\x00garbage", reading.memory.regions, reading.memory.host_address)
    with pytest.raises(ReadError):
        reading.transport.connect(garbage)


def test_killed_source_leaves_a_connection_that_closes_and_a_transport_that_goes_on(
    real_transport: str,
) -> None:
    num_blocks, block_bytes = 513, 65536
    with ExitStack() as stack:
        victim = stack.enter_context(
            Peer("memory", real_transport, num_blocks=num_blocks, block_bytes=block_bytes)
        )
        reading = stack.enter_context(reading_from(real_transport, victim.memory, num_blocks, block_bytes))
        reading.start(range(1, num_blocks), range(1, num_blocks))
        victim.kill()
        for _ in range(50):
            for result in reading.connection.poll():
                assert result.error is None or result.peer_lost
        reading.connection.close()
        reading.pool.kv[:] = 0
        heir = stack.enter_context(
            Peer("memory", real_transport, num_blocks=num_blocks, block_bytes=block_bytes)
        )
        reading.connection = reading.transport.connect(heir.memory)
        reading.start((5,), (6,))
        assert reading.finish()[0].error is None
        assert reading.pool.holds((6,), (5,))


def test_close_fences_a_source_that_is_stopped_and_resumed(real_transport: str) -> None:
    num_blocks, block_bytes = 2049, 65536
    with ExitStack() as stack:
        peer = stack.enter_context(
            Peer("memory", real_transport, num_blocks=num_blocks, block_bytes=block_bytes)
        )
        reading = stack.enter_context(reading_from(real_transport, peer.memory, num_blocks, block_bytes))
        reading.start((1,), (1,))
        reading.finish()
        peer.stop()
        reading.start(range(1, num_blocks), range(1, num_blocks))
        reading.connection.poll()
        reading.connection.close()
        reading.pool.kv[:] = 0
        peer.resume()
        peer.tell("echo")
        peer.next_line()
        assert not reading.pool.kv.any()


def test_unknown_transport_is_named() -> None:
    with pytest.raises(SettingsError, match="transport must be one of auto, nixl, zmq, fake, got 'rdma'"):
        make_transport("rdma")


def test_nixl_that_cannot_be_loaded_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.transports.nixl._PACKAGES", ("no_such_nixl",))
    with pytest.raises(TransportUnavailable, match=r"tandem-serve\[nixl\].*--transport zmq") as caught:
        make_transport("nixl")
    assert "\n" not in str(caught.value)
    assert make_transport("auto").version.startswith("no nixl")


@needs_nixl
def test_user_settings_of_ucx_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("UCX_TCP_USER_TIMEOUT", "9s")
    monkeypatch.delenv("UCX_TCP_SYN_CNT", raising=False)
    make_transport("nixl")
    assert (os.environ["UCX_TCP_USER_TIMEOUT"], os.environ["UCX_TCP_SYN_CNT"]) == ("9s", "2")
