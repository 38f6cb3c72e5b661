"""First contact: the path is measured and its bytes are checked before any hand-over is asked for."""

import logging

import numpy as np
import pytest

from kv_transfer.events import Arrived, Offered
from kv_transfer.self_test import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    NUM_SLOTS,
    Broken,
    Measured,
    SelfTest,
    SinkScratch,
    SourceScratch,
)
from kv_transfer.settings import TransferSettings
from kv_transfer.transport import RemoteMemory
from kv_transfer.transports.fake import FakeTransport
from tests.kv_transfer.builders import offer
from tests.kv_transfer.ends import SinkEnd, SourceEnd, a_sink, a_source, address_of
from wire.transfer import TransferPeer

EPOCH = 7


class Joined:
    """A fake source and sink that have nothing but scratch memory, and a timer that counts its calls."""

    def __init__(self, source_epoch: int = EPOCH) -> None:
        self.source_scratch = SourceScratch(source_epoch)
        self.scratch = SinkScratch()
        self.source, self.sink = FakeTransport(), FakeTransport()
        blob = self.source.register([self.source_scratch.region], "inproc://control")
        self.sink.register([self.scratch.region], None)
        self._memory = RemoteMemory(blob, (self.source_scratch.region,), "inproc://control")
        self._now_s = 0.0

    def timer(self) -> float:
        self._now_s += 0.5
        return self._now_s

    def test(self) -> SelfTest:
        return SelfTest(self.sink.connect(self._memory), 0, self.scratch, EPOCH, self.timer)


def finish(test: SelfTest) -> Measured | Broken:
    for _ in range(100):
        found = test.poll()
        if found is not None:
            return found
    raise AssertionError("the self-test does not end")


def test_latency_and_rate_come_from_the_reads() -> None:
    assert finish(Joined().test()) == Measured(0.5, NUM_BLOCKS * BLOCK_BYTES / 0.5)


def test_bytes_of_another_epoch_are_a_broken_path() -> None:
    found = finish(Joined(source_epoch=EPOCH + 1).test())
    assert isinstance(found, Broken)
    assert "not those that were read" in found.message


def test_read_error_is_a_broken_path() -> None:
    joined = Joined()
    joined.sink.spares_self_tests = False
    joined.sink.next_error = "no route"
    assert finish(joined.test()) == Broken("no route")


def test_tests_under_way_together_have_destinations_of_their_own() -> None:
    joined = Joined()
    tests = [joined.test() for _ in range(NUM_SLOTS + 1)]
    found = [test.poll() for test in tests]
    assert found == [None] * len(tests)
    for test in tests[:-1]:
        assert isinstance(finish(test), Measured)
        test.close()
    assert isinstance(finish(tests[-1]), Measured)


def contact(source: SourceEnd, sink: SinkEnd) -> TransferPeer:
    """One hand-over; what the sink then knows of its source."""
    sink.sink.request("h", address_of(source.source.control_address))
    source.source.offer(offer())
    assert isinstance(sink.event(), Offered)
    sink.sink.pull("h", [7, 8])
    assert isinstance(sink.event(), Arrived)
    (peer,) = sink.sink.peers()
    return peer


def test_t18_the_record_and_the_log_line_name_the_path_and_the_librarys_version(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kv_transfer")
    settings = TransferSettings(min_self_test_bytes_per_s=1.0)
    with a_source("zmq") as source, a_sink("zmq", settings) as sink:
        peer = contact(source, sink)
        version = sink.transport.version
    assert (peer.engine_id, peer.state, peer.path, peer.version) == ("prompt-0", "ready", "zmq tcp", version)
    assert peer.latency_s > 0
    assert peer.rate_bytes_per_s > 1e6
    assert (peer.arrived, peer.counts_by_stage["read"]) == (1, 1)
    (line,) = [record for record in caplog.records if record.name == "kv_transfer.sink_contact"]
    assert line.levelno == logging.INFO
    assert f"is read over zmq tcp (version {version} there)" in line.getMessage()


def test_t19_a_rate_below_the_threshold_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    settings = TransferSettings(min_self_test_bytes_per_s=1e15)
    with a_source() as source, a_sink(settings=settings) as sink:
        contact(source, sink)
    (line,) = [record for record in caplog.records if record.name == "kv_transfer.sink_contact"]
    assert line.levelno == logging.WARNING
    assert "--min-self-test-rate" in line.getMessage()


def test_a_path_that_is_not_rdma_is_refused_where_rdma_is_required() -> None:
    with a_source("zmq") as source, a_sink("zmq", TransferSettings(require_rdma=True)) as sink:
        sink.sink.request("h", address_of(source.source.control_address))
        failed = sink.failure()
    assert failed.reason == "self_test_failed"
    assert "it is read over zmq tcp, which is not RDMA (--require-rdma)" in failed.message


def test_a_source_whose_memory_cannot_be_read_is_never_asked_for_a_hand_over() -> None:
    settings = TransferSettings(self_test_timeout_s=0.1)
    with a_source() as source, a_sink(settings=settings) as sink:
        assert isinstance(sink.transport, FakeTransport)
        sink.transport.stalled = True
        sink.transport.spares_self_tests = False
        sink.sink.request("h", address_of(source.source.control_address))
        source.source.offer(offer())
        failed = sink.failure()
        assert (failed.reason, failed.blocks_safe) == ("self_test_failed", True)
        assert "fake: nothing could be read within 0.1 s" in failed.message
        assert source.source.stats().leases_granted == 0


def test_the_pattern_differs_in_every_block() -> None:
    blocks = SourceScratch(EPOCH)._memory.buffer.reshape(NUM_BLOCKS, BLOCK_BYTES)
    assert len(np.unique(blocks, axis=0)) == NUM_BLOCKS
