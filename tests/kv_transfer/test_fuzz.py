"""T5: whatever bytes come to a control or data socket are counted and dropped; the service goes on."""

import gc
import os
import random
import socket
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import psutil
import pytest
import zmq

from kv_transfer.events import Failed
from kv_transfer.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Hello,
    Introduce,
    LeaseRef,
    Release,
    Renew,
    ToSource,
    Want,
    encode,
)
from kv_transfer.settings import TransferSettings
from kv_transfer.transport import BlockRead, RemoteMemory
from kv_transfer.transports.zmq import ZmqTransport
from tests.kv_transfer.builders import COMPATIBILITY, Pool, offer
from tests.kv_transfer.ends import a_sink, a_source, address_of
from tests.kv_transfer.test_messages import TO_SINK, TO_SOURCE

NUM_MESSAGES = 2000
MEMORY_LIMIT_BYTES = 64 << 20
TIMEOUT_S = 20.0
MINE = "the reader's own"
"""No mangled message asks for this: a reader that does takes a hand-over from another."""

NUM_ABORTED = 10_000


def mutate(chance: random.Random, data: bytes) -> bytes:
    """`data` with bits flipped, stretches cut, repeated or replaced, or a length made huge."""
    mangled = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        place = chance.randrange(len(mangled) + 1)
        match chance.randrange(6):
            case 0 if place < len(mangled):
                mangled[place] ^= 1 << chance.randrange(8)
            case 1:
                del mangled[place : place + chance.randrange(1, 9)]
            case 2:
                mangled[place:place] = chance.randbytes(chance.randrange(1, 9))
            case 3:
                mangled[place : place + 5] = chance.choice((b"\xdd", b"\xdf", b"\xc6", b"\xdb")) + b"\xff" * 4
            case 4:
                mangled += mangled[:place]
            case _:
                mangled[place : place + 1] = bytes([chance.choice((0, 0x7F, 0x80, 0x90, 0xC0, 0xCB, 0xFF))])
    return bytes(mangled)


def hello_then(sequence: int) -> list[ToSource]:
    """What makes a stranger a known reader, so that the rest reaches the ledger."""
    return [
        Hello(1, PROTOCOL_VERSION, dict(COMPATIBILITY)),
        Introduce(1, "prompt-0", f"vandal-{sequence}", 1, "zmq", "0"),
        Want(1, "stolen"),
        Renew(1, 1, [LeaseRef("h", 1), LeaseRef("stolen", 2)]),
        Release(1, "h", 1, "done"),
    ]


def test_t5_a_source_counts_and_drops_what_vandals_send_and_serves_its_reader() -> None:
    chance = random.Random(5)
    rss = psutil.Process().memory_info().rss
    with (
        zmq.Context() as context,
        context.socket(zmq.DEALER) as vandal,
        a_source("zmq") as source,
        a_sink("zmq") as sink,
    ):
        vandal.setsockopt(zmq.LINGER, 0)
        vandal.connect(source.source.control_address)
        sink.sink.request(MINE, address_of(source.source.control_address))
        source.source.offer(offer(MINE))
        sink.event()
        for message in hello_then(0)[:2]:
            vandal.send(encode(message))
        valid = [encode(message) for message in TO_SOURCE + hello_then(1)]
        for _ in range(NUM_MESSAGES):
            frames = [mutate(chance, chance.choice(valid)) for _ in range(chance.choice((1, 1, 1, 2)))]
            vandal.send_multipart(frames)
        for message in (b"\xdd" + b"\xff" * (MAX_MESSAGE_BYTES - 1), b"\x91" * 900_000):
            vandal.send(message)
        sink.sink.pull(MINE, [7, 8])
        assert type(sink.event()).__name__ == "Arrived"
        assert sink.pool.holds((7, 8), (3, 5))
        vandal.send(encode(Renew(1, 2**40, [])))
        wait_for_answer(vandal, b"Renewed")
        stats = source.source.stats()
    assert stats.internal_errors == 0
    assert stats.ignored_by_kind["invalid"] > NUM_MESSAGES / 2
    assert psutil.Process().memory_info().rss - rss < MEMORY_LIMIT_BYTES


def wait_for_answer(socket: "zmq.Socket[bytes]", kind: bytes) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until_s:
        if socket.poll(1000) and kind in socket.recv():
            return
    raise AssertionError(f"no {kind!r}")


@pytest.mark.parametrize("transport", ["fake", "zmq"])
def test_t5_bytes_that_are_not_even_zmq_end_their_connection_only(transport: str) -> None:
    chance = random.Random(6)
    num_open = len(os.listdir("/proc/self/fd"))
    with a_source(transport) as source, a_sink(transport) as sink:
        host, port = source.source.control_address.removeprefix("tcp://").split(":")
        for _ in range(50):
            with socket.create_connection((host, int(port))) as bare:
                bare.sendall(chance.choice((b"", b"\xff\0\0\0\0\0\0\0\1\x7f")) + chance.randbytes(200))
        sink.sink.request("h", address_of(source.source.control_address))
        source.source.offer(offer())
        sink.event()
        sink.sink.pull("h", [7, 8])
        assert type(sink.event()).__name__ == "Arrived"
    assert len(os.listdir("/proc/self/fd")) <= num_open + 2


def test_t5_a_sink_survives_a_source_that_lies() -> None:
    """Every answer is a mangled one, of the right epoch or not; the request fails within its limits."""
    chance = random.Random(7)
    valid = [encode(message) for message in TO_SINK]
    settings = TransferSettings(connect_timeout_s=0.5, breaker_failures=1000)
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as liar,
        a_sink("zmq", settings) as sink,
    ):
        liar.setsockopt(zmq.LINGER, 0)
        port = liar.bind_to_random_port("tcp://127.0.0.1")
        failures = 0
        for index in range(3):
            sink.sink.request(f"h{index}", address_of(f"tcp://127.0.0.1:{port}"))
            until_s = time.monotonic() + TIMEOUT_S
            while not (events := sink.sink.events()):
                assert time.monotonic() < until_s
                if liar.poll(10):
                    reader, *_ = liar.recv_multipart()
                    for _ in range(100):
                        liar.send_multipart([reader, mutate(chance, chance.choice(valid))])
            assert all(isinstance(event, Failed) for event in events)
            failures += 1
        stats = sink.sink.stats()
    assert failures == 3
    assert stats.internal_errors == 0
    assert stats.ignored_by_kind["invalid"] > 50


class LyingData:
    """A data socket that answers every piece with something else."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")

    def lie(self, chance: random.Random) -> None:
        while self.socket.poll(0):
            reader, ask = self.socket.recv_multipart()
            sequence = msgspec.msgpack.decode(ask)[1]
            header = msgspec.msgpack.encode([sequence, ""])
            answer = chance.choice(
                [
                    [mutate(chance, header)],
                    [header],
                    [header, chance.randbytes(chance.randrange(1 << 16))],
                    [header, b"", b"", b"x"],
                    [header] + [chance.randbytes(100)] * chance.randrange(1, 40),
                    [mutate(chance, header), chance.randbytes(4096)],
                ]
            )
            self.socket.send_multipart([reader, *answer])


@pytest.fixture
def liar() -> Iterator[LyingData]:
    with zmq.Context() as context:
        data = LyingData(context)
        yield data
        data.socket.close()


def test_t5_a_reader_of_lying_data_fails_its_read_and_writes_nowhere_else(liar: LyingData) -> None:
    chance = random.Random(8)
    pool, transport = Pool(), ZmqTransport()
    transport.register(pool.regions, None)
    blob = msgspec.msgpack.encode([b"t" * 16, liar.port])
    connection = transport.connect(RemoteMemory(blob, pool.regions, "tcp://127.0.0.1:1"))
    ids = np.array([3, 5, 6], dtype=np.int32)
    for _ in range(100):
        read_id = connection.read([BlockRead(0, ids, ids)])
        until_s = time.monotonic() + 0.1
        while time.monotonic() < until_s and not connection.poll():
            liar.lie(chance)
        assert connection.cancel(read_id)
    assert not np.delete(pool.kv, ids, axis=0).any()
    assert not pool.state.any()
    connection.close()
    transport.close()


def test_t7_aborted_requests_leave_memory_and_descriptors_flat() -> None:
    gc.collect()  # what other tests left open is not to be closed meanwhile
    with a_source("zmq") as source, a_sink("zmq") as sink:
        address = address_of(source.source.control_address)

        def abort(first: int, count: int) -> tuple[int, int]:
            for index in range(first, first + count):
                sink.sink.request(f"h{index}", address)
                if index % 2:
                    source.source.offer(offer(f"h{index}"))
                    assert type(sink.event()).__name__ == "Offered"
                sink.sink.abandon(f"h{index}")
                assert type(sink.event()).__name__ == "Reclaimable"
                if index % 2:
                    assert source.event().handover_id == f"h{index}"
            return psutil.Process().memory_info().rss, len(os.listdir("/proc/self/fd"))

        before = abort(0, 500)
        after = abort(500, NUM_ABORTED - 500)
        assert after[0] - before[0] < 16 << 20
        assert after[1] <= before[1]
        assert (sink.sink.stats().num_handovers, source.source.stats().num_pinned) == (0, 0)
