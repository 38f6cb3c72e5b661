"""Peers that die, stop, stall and come back: what fails, how fast, and that nothing is written afterwards."""

import time

import numpy as np
import pytest

from kv_transfer.events import Arrived, Failed, Offered, Reclaimable
from kv_transfer.settings import TransferSettings
from kv_transfer.transports.fake import FakeTransport
from tests.kv_transfer.builders import Pool, offer
from tests.kv_transfer.clocks import JumpingClock
from tests.kv_transfer.ends import LOSS_LIMIT_S, SinkEnd, a_sink, a_source, address_of
from tests.kv_transfer.processes import FENCED_TRANSPORTS, Peer
from tests.ports import free_port
from tests.system.processes import eventually

NUM_BLOCKS, BLOCK_BYTES = 1025, 65536
EVERY_BLOCK = list(range(1, NUM_BLOCKS))
AT_ONCE_S = 8.0
"""Far less than a pause of the breaker, `PAUSE_S` or the half of it."""
PAUSE_S = 100.0
BACK_LIMIT_S = 5.0
"""A restarted prompt engine is talked to again within this."""


def try_to_pull(sink: SinkEnd, peer: Peer, handover_id: str, address: str, epoch: int = 1) -> bool:
    """One hand-over of two blocks; False if the sink reports a failure."""
    sink.sink.request(handover_id, address_of(address, epoch))
    peer.tell("offer", handover_id, 6, [3, 5])
    event = sink.event()
    if isinstance(event, Offered):
        sink.sink.pull(handover_id, [7, 8])
        event = sink.event()
    assert isinstance(event, Arrived | Failed), event
    return isinstance(event, Arrived)


def pull_until_it_works(sink: SinkEnd, peer: Peer, address: str, epoch: int = 1) -> float:
    """Seconds until a hand-over arrives."""
    began_s = time.monotonic()
    attempt = 0
    while not try_to_pull(sink, peer, f"again-{epoch}-{attempt}", address, epoch):
        attempt += 1
        assert time.monotonic() - began_s < 2 * BACK_LIMIT_S
    return time.monotonic() - began_s


def test_t15_blocks_of_a_read_that_does_not_end_are_quarantined_until_its_peer_is_fenced() -> None:
    clock, settings = JumpingClock(), TransferSettings(read_timeout_s=0.1, fence_after_s=0.3)
    with a_source() as source, a_sink(settings=settings, clock=clock) as sink:
        transport = sink.transport
        assert isinstance(transport, FakeTransport)
        transport.stalled = True
        sink.sink.request("h", address_of(source.source.control_address))
        source.source.offer(offer())
        assert isinstance(sink.event(), Offered)
        sink.sink.pull("h", [7, 8])
        eventually(lambda: transport.num_reads == 1, "the read begins")
        clock.jump(2 * settings.read_timeout_s)
        failed = sink.failure()
        assert (failed.reason, failed.blocks_safe) == ("read_timeout", False)
        assert sink.sink.stats().num_quarantined_blocks == 2
        clock.jump(settings.fence_after_s)
        assert sink.event() == Reclaimable("h")
        stats = sink.sink.stats()
        assert (stats.num_quarantined_blocks, stats.fences, transport.num_open) == (0, 1, 0)
        transport.stalled = False
        sink.sink.request("k", address_of(source.source.control_address))
        source.source.offer(offer("k"))
        assert isinstance(sink.event(), Offered)
        sink.sink.pull("k", [7, 8])
        assert isinstance(sink.event(), Arrived)


@pytest.mark.parametrize("transport", FENCED_TRANSPORTS)
def test_t15_source_that_is_stopped_during_a_read_writes_nothing_when_it_goes_on(transport: str) -> None:
    peer = Peer("source", transport, num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES)
    with peer, a_sink(transport, pool=Pool(NUM_BLOCKS, BLOCK_BYTES)) as sink:
        assert try_to_pull(sink, peer, "first", peer.ready[0])
        sink.sink.request("h", address_of(peer.ready[0]))
        peer.tell("offer", "h", 4 * len(EVERY_BLOCK), EVERY_BLOCK)
        assert isinstance(sink.event(), Offered)
        peer.stop()
        sink.sink.pull("h", EVERY_BLOCK)
        event = sink.event()
        if isinstance(event, Failed):  # a same-host copy needs no living source
            assert event.blocks_safe
        sink.pool.kv[:] = 255
        peer.resume()
        pull_until_it_works(sink, peer, peer.ready[0])
        others = np.setdiff1d(np.arange(NUM_BLOCKS), [7, 8])
        assert (sink.pool.kv[others] == 255).all()


def test_t20_killed_source_that_restarts_at_its_address_is_read_again(real_transport: str) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with a_sink(real_transport) as sink:
        for epoch in (1, 2):
            with Peer("source", real_transport, address=address, epoch=epoch) as peer:
                assert pull_until_it_works(sink, peer, address, epoch) < BACK_LIMIT_S
                sink.sink.request("stale", address_of(address, epoch + 10))
                assert sink.failure().reason == "wrong_engine"
                sink.sink.request(f"last-{epoch}", address_of(address, epoch))
                peer.catch_up()
                peer.kill()
                assert sink.failure(LOSS_LIMIT_S).reason == "peer_lost"
                for index in range(4):
                    sink.sink.request(f"dead-{epoch}-{index}", address_of(address, epoch))
                for _ in range(4):
                    failed = sink.failure(LOSS_LIMIT_S)
                    assert failed.reason in ("connect_failed", "peer_paused")
                    assert "nobody listens there" in failed.message


def test_peer_that_fails_again_and_again_is_refused_at_once_and_tried_again_later() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    clock = JumpingClock(runs=True)
    settings = TransferSettings(
        refused_timeout_s=0.05, breaker_failures=2, breaker_pause_s=PAUSE_S, breaker_max_pause_s=PAUSE_S
    )
    with a_sink("zmq", settings, clock=clock) as sink:
        for index in range(2):
            sink.sink.request(f"dead-{index}", address_of(address))
            assert sink.failure().reason == "connect_failed"
        began_s = time.monotonic()
        sink.sink.request("paused", address_of(address))
        failed = sink.failure()
        assert time.monotonic() - began_s < AT_ONCE_S
        assert (failed.reason, failed.blocks_safe) == ("peer_paused", True)
        assert failed.message.startswith(f"prompt engine prompt-0 at {address}: it failed 2 times in a row")
        assert sink.sink.stats().num_paused_peers == 1
        with Peer("source", "zmq", address=address) as peer:
            clock.jump(PAUSE_S)
            assert pull_until_it_works(sink, peer, address) < BACK_LIMIT_S
        assert sink.sink.stats().failures_by_reason["peer_paused"] >= 1
