"""What is special about the ZMQ transport: its data port takes bytes from anyone."""

import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.transport import BlockRead, ReadResult, RemoteMemory
from kv_transfer.transports.pieces import MAX_EXTENT_BYTES
from kv_transfer.transports.zmq import ZmqConnection, ZmqTransport, _Ask
from tests.kv_transfer.builders import BLOCK_BYTES, Pool

TIMEOUT_S = 10.0


class DataPort:
    """A filled source, a reader of it, and a bare socket to its data port."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.source, self.sink, self.pool = ZmqTransport(), ZmqTransport(), Pool()
        self.source_pool = Pool().fill()
        blob = self.source.register(self.source_pool.regions, "tcp://127.0.0.1:1")
        self.token, port = msgspec.msgpack.decode(blob)
        self.memory = RemoteMemory(blob, self.source_pool.regions, "tcp://127.0.0.1:1")
        self.sink.register(self.pool.regions, None)
        self.connection: ZmqConnection = self.sink.connect(self.memory)
        self.bare = context.socket(zmq.DEALER)
        self.bare.setsockopt(zmq.LINGER, 0)
        self.bare.connect(f"tcp://127.0.0.1:{port}")

    def ask(self, region: int, *extents: tuple[int, int], token: bytes | None = None) -> tuple[str, bytes]:
        """The error and the data of the answer."""
        pairs = np.array(extents, dtype="<i8").tobytes()
        self.bare.send(msgspec.msgpack.encode(_Ask(token or self.token, 7, region, pairs)))
        assert self.bare.poll(int(TIMEOUT_S * 1000))
        header, data = self.bare.recv_multipart()
        sequence, error = msgspec.msgpack.decode(header)
        assert sequence == 7
        return error, data

    def start(self, *block_ids: int) -> int:
        ids = np.array(block_ids, dtype=np.int32)
        return self.connection.read([BlockRead(0, ids, ids)])

    def finish(self) -> list[ReadResult]:
        until_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until_s:
            results = self.connection.poll()
            if results:
                return results
        raise AssertionError("the read did not end")

    def close(self) -> None:
        self.bare.close()
        self.connection.close()
        self.sink.close()
        self.source.close()


@pytest.fixture(scope="module")
def port() -> Iterator[DataPort]:
    with zmq.Context() as context:
        port = DataPort(context)
        yield port
        port.close()


@pytest.fixture(autouse=True)
def _clean(port: DataPort) -> None:
    port.pool.kv[:] = 0


def test_extents_come_in_the_order_they_were_asked_for(port: DataPort) -> None:
    error, data = port.ask(0, (3 * BLOCK_BYTES, 2), (BLOCK_BYTES - 1, 2), (0, 1))
    assert (error, data) == ("", bytes([4, 4, 1, 2, 1]))


def test_asker_of_a_former_source_gets_nothing(port: DataPort) -> None:
    assert port.ask(0, (0, 4), token=b"\0" * 16) == ("the source was restarted", b"")


@pytest.mark.parametrize(
    "extents",
    [
        [(-1, 4)],
        [(0, 0)],
        [(0, -5)],
        [(2**62, 2**62)],
        [(16 * BLOCK_BYTES - 3, 4)],
        [(0, MAX_EXTENT_BYTES + 1)],
        [(0, 4096)] * 2000,
    ],
)
def test_extents_outside_the_region_or_the_limit_get_nothing(
    port: DataPort, extents: list[tuple[int, int]]
) -> None:
    assert port.ask(0, *extents) == ("outside the region", b"")


def test_small_extents_over_the_staging_limit_get_nothing(port: DataPort) -> None:
    assert port.ask(0, *[(0, 4096)] * 400) == ("too much for one message", b"")


def test_unknown_region_gets_nothing(port: DataPort) -> None:
    assert port.ask(5, (0, 4)) == ("no such region", b"")


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=80), min_size=1, max_size=3))
def test_any_bytes_leave_the_source_serving(port: DataPort, frames: list[bytes]) -> None:
    port.bare.send_multipart(frames)
    assert port.ask(0, (0, 1)) == ("", b"\1")


def test_cancelled_read_leaves_no_answers_behind(port: DataPort) -> None:
    for _ in range(20):
        assert port.connection.cancel(port.start(1, 3, 5, 7))
    port.pool.kv[:] = 0
    read_id = port.start(9)
    assert port.finish() == [ReadResult(read_id)]
    assert port.pool.holds((9,), (9,))


def test_cancel_beside_another_read_spares_it(port: DataPort) -> None:
    kept = port.start(2)
    port.connection.cancel(port.start(4))
    assert port.finish() == [ReadResult(kept)]
    assert port.pool.holds((2,), (2,))


def test_answers_of_a_restarted_source_fail_the_read(port: DataPort) -> None:
    fields = msgspec.msgpack.decode(port.memory.blob)
    stale = RemoteMemory(
        msgspec.msgpack.encode([b"\0" * 16, fields[1]]), port.memory.regions, port.memory.host_address
    )
    connection = port.sink.connect(stale)
    ids = np.array([1], dtype=np.int32)
    read_id = connection.read([BlockRead(0, ids, ids)])
    until_s = time.monotonic() + TIMEOUT_S
    results: list[ReadResult] = []
    while not results and time.monotonic() < until_s:
        results = connection.poll()
    connection.close()
    assert results == [ReadResult(read_id, "the source was restarted")]
    assert not port.pool.kv.any()
