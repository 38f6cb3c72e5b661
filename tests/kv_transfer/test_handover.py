"""The two ends with their threads and sockets; peers that die are real processes."""

import gc
import os
import time
from types import SimpleNamespace
from typing import cast

import pytest
import zmq

from kv_transfer.errors import BindError, LayoutError, SettingsError
from kv_transfer.events import Arrived, Offered, Reclaimable, Released, SinkEvent
from kv_transfer.messages import Refused
from kv_transfer.settings import TransferSettings
from kv_transfer.sink_hello import SinkHello
from kv_transfer.transport import Transport
from tests.kv_transfer.builders import FIRST, Pool, identity, offer
from tests.kv_transfer.clocks import JumpingClock
from tests.kv_transfer.ends import (
    LOSS_LIMIT_S,
    SourceEnd,
    a_sink,
    a_source,
    address_of,
    hand_over,
)
from tests.kv_transfer.processes import TIMEOUT_S, Peer
from tests.ports import free_port
from wire.services import PromptEngineAddress

# Both ends in one process


def test_hand_over_through_sockets_and_threads() -> None:
    with a_source() as source, a_sink() as sink:
        sink.sink.request("h", address_of(source.source.control_address))
        source.source.offer(offer())
        assert sink.event() == Offered("h", 6, 2)
        sink.sink.pull("h", [7, 8])
        assert sink.event() == Arrived("h", FIRST)
        assert source.event() == Released("h", "released")
        assert sink.pool.holds((7, 8), (3, 5))
        stats = sink.sink.stats()
        assert (stats.arrived, stats.blocks_read, stats.num_handovers) == (1, 2, 0)
        assert stats.counts_by_stage == {"wait": 1, "queue": 1, "read": 1, "tail": 1, "confirm": 1}
        assert source.source.stats().ends_by_reason == {"released": 1}
        (reader,) = source.source.peers()
        assert (reader.engine_id, reader.leases_by_event) == ("completion-0", {"granted": 1})


def test_hand_over_through_ipc(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("k") / "c"
    with a_source("zmq", f"ipc://{path}") as source, a_sink("zmq") as sink:
        sink.sink.request("h", address_of(source.source.control_address))
        source.source.offer(offer())
        assert sink.event() == Offered("h", 6, 2)
        sink.sink.pull("h", [7, 8])
        assert sink.event() == Arrived("h", FIRST)
        assert sink.pool.holds((7, 8), (3, 5))


def test_abandon_and_withdraw_cross_the_wire() -> None:
    with a_source() as source, a_sink() as sink:
        sink.sink.request("h", address_of(source.source.control_address))
        source.source.offer(offer())
        sink.event()
        sink.sink.abandon("h")
        assert sink.event() == Reclaimable("h")
        assert source.event() == Released("h", "abandoned")
        sink.sink.request("k", address_of(source.source.control_address))
        source.source.withdraw("k")
        assert sink.failure().reason == "withdrawn"


def test_closing_sink_frees_the_source_at_once() -> None:
    with a_source() as source:
        with a_sink() as sink:
            sink.sink.request("h", address_of(source.source.control_address))
            source.source.offer(offer())
            sink.event()
        assert source.event() == Released("h", "abandoned")


def test_closed_source_fails_its_readers() -> None:
    with a_sink() as sink:
        with a_source() as source:
            sink.sink.request("h", address_of(source.source.control_address))
            source.source.offer(offer())
            sink.event()
        assert sink.failure(LOSS_LIMIT_S).reason == "peer_lost"


def test_offer_that_contradicts_the_layout_is_refused_to_the_engine() -> None:
    with a_source() as source:
        for wrong in (offer(num_tokens=9), offer(block_ids=(0, 1)), offer(block_ids=(1, 99)), offer(slot=9)):
            with pytest.raises(LayoutError):
                source.source.offer(wrong)
        assert source.source.stats().num_pinned == 0


def test_port_in_use_is_named_and_leaves_nothing_open() -> None:
    with a_source() as source, pytest.raises(BindError, match=source.source.control_address):
        SourceEnd("zmq", source.source.control_address)


def test_wildcard_needs_a_host_to_advertise() -> None:
    with pytest.raises(SettingsError, match="advertise_host"):
        SourceEnd("zmq", "tcp://0.0.0.0:0")
    settings = TransferSettings(advertise_host="127.0.0.1")
    with a_source("zmq", "tcp://0.0.0.0:0", settings) as source, a_sink("zmq") as sink:
        sink.sink.request("h", address_of(source.source.control_address))
        source.source.offer(offer())
        sink.event()
        sink.sink.pull("h", [7, 8])
        assert sink.event() == Arrived("h", FIRST)


def test_mismatch_fails_within_a_second_and_spares_the_others() -> None:
    """On a clock that stands still: nothing is waited for."""
    different = identity("c", 1, dtype="float16")
    with a_source() as source, a_sink(own_identity=different, clock=JumpingClock()) as sink:
        sink.sink.request("h", address_of(source.source.control_address))
        failed = sink.failure()
        assert failed.reason == "incompatible"
        assert "dtype is float32 there and float16 here" in failed.message
        with a_sink() as good:
            good.sink.request("h", address_of(source.source.control_address))
            source.source.offer(offer())
            assert good.event() == Offered("h", 6, 2)


def test_unequal_transports_are_refused_by_name() -> None:
    with a_source("fake") as source, a_sink("zmq") as sink:
        sink.sink.request("h", address_of(source.source.control_address))
        assert sink.failure().message.endswith(
            "transport is fake there and zmq here; start both engines with the same --transport"
        )


@pytest.mark.parametrize(
    ("there", "here", "side"), [("nixl", "auto", "this engine"), ("auto", "nixl", "the other engine")]
)
def test_beside_memory_that_only_nixl_reads_the_other_engine_must_change(
    there: str, here: str, side: str
) -> None:
    """As a GPU's: its engine takes NIXL whatever it is told."""
    address = PromptEngineAddress(engine_id="p", epoch=1, control_address="tcp://127.0.0.1:1")
    hello = SinkHello(address, identity("c"), (), cast(Transport, SimpleNamespace(name=here)))
    refused = hello.refused(Refused(1, "transport", there, here))
    assert refused.message == (
        f"transport is {there} there and {here} here; start {side} with --transport nixl"
    )


def test_blocks_that_are_no_multiple_of_each_other_are_refused() -> None:
    with a_source() as source, a_sink(pool=Pool(block_bytes=6144)) as sink:
        sink.sink.request("h", address_of(source.source.control_address))
        assert "block_size is 4096 bytes there and 6144 bytes here" in sink.failure().message


def test_nobody_listening_fails_soon() -> None:
    with a_sink() as sink:
        sink.sink.request("h", address_of(f"tcp://127.0.0.1:{free_port()}"))
        failed = sink.failure(LOSS_LIMIT_S)
        assert (failed.reason, failed.blocks_safe) == ("connect_failed", True)
        assert failed.message.endswith("nobody listens there")


@pytest.mark.parametrize(
    "address", ["", "nonsense", "tcp://", "tcp://127.0.0.1:0", "tcp://127.0.0.1:99999999"]
)
def test_address_that_is_none_fails_the_request_only(address: str) -> None:
    with a_sink(settings=TransferSettings(connect_timeout_s=0.5)) as sink:
        sink.sink.request("h", address_of(address))
        assert sink.failure(LOSS_LIMIT_S).reason in ("refused", "connect_failed")


def test_too_many_handovers_are_refused() -> None:
    with a_source() as source, a_sink(settings=TransferSettings(max_handovers=1)) as sink:
        sink.sink.request("h", address_of(source.source.control_address))
        sink.sink.request("k", address_of(source.source.control_address))
        failed = sink.failure()
        assert (failed.handover_id, failed.reason) == ("k", "refused")
        assert "max_handovers" in failed.message


def test_bytes_that_are_no_messages_are_counted_and_ignored() -> None:
    with (
        a_source() as source,
        a_sink() as sink,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as vandal,
    ):
        vandal.setsockopt(zmq.LINGER, 0)
        vandal.connect(source.source.control_address)
        for frames in ([b""], [b"\xc1"], [b"\x93" * 1000], [b"a", b"b"], [b"x" * 100_000]):
            vandal.send_multipart(frames)
        sink.sink.request("h", address_of(source.source.control_address))
        source.source.offer(offer())
        assert sink.event() == Offered("h", 6, 2)
        while source.source.stats().ignored_by_kind.get("invalid", 0) < 5:
            vandal.poll(1)


def test_calls_after_close_are_ignored() -> None:
    with a_source() as source, a_sink() as sink:
        source.source.close()
        sink.sink.close()
        source.source.offer(offer())
        source.source.withdraw("h")
        sink.sink.request("h", address_of(source.source.control_address))
        sink.sink.pull("h", [1])
        sink.sink.abandon("h")
        assert (source.source.events(), sink.sink.events()) == ([], [])


@pytest.mark.parametrize("num", [128, 512])
def test_t11_hundreds_of_handovers_at_once_all_arrive(num: int) -> None:
    with a_source("zmq", pool=Pool(num + 1)) as source, a_sink("zmq", pool=Pool(num + 1)) as sink:
        address = address_of(source.source.control_address)
        for index in range(1, num + 1):
            sink.sink.request(f"h{index}", address)
            source.source.offer(offer(f"h{index}", 4, (index,)))
        events: list[SinkEvent] = []
        while len(events) < 2 * num:
            event = sink.event()
            events.append(event)
            if isinstance(event, Offered):
                block_id = int(event.handover_id[1:])
                sink.sink.pull(event.handover_id, [num + 1 - block_id])
        assert {type(event) for event in events} == {Offered, Arrived}
        assert sink.pool.holds(range(1, num + 1), range(num, 0, -1))


def test_aborted_requests_leave_no_descriptors_and_no_state_behind() -> None:
    gc.collect()  # what other tests left open is not to be closed meanwhile
    with a_source("zmq") as source, a_sink("zmq") as sink:
        address = address_of(source.source.control_address)

        def abort(count: int) -> int:
            for index in range(count):
                sink.sink.request(f"h{index}", address)
                sink.sink.abandon(f"h{index}")
            for _ in range(count):
                assert isinstance(sink.event(), Reclaimable)
            return len(os.listdir("/proc/self/fd"))

        sink.sink.request("first", address)
        source.source.offer(offer("first"))
        assert isinstance(sink.event(), Offered)
        sink.sink.pull("first", [7, 8])
        assert sink.event() == Arrived("first", FIRST)
        assert source.event() == Released("first", "released")
        num_open = abort(1)
        assert abort(500) <= num_open
        stats = sink.sink.stats()
        assert (stats.num_handovers, stats.num_peers, stats.abandoned) == (0, 1, 501)
        source.source.offer(offer("h7"))
        assert source.event() == Released("h7", "abandoned")


# A source that dies, in a second process


def test_hand_over_from_another_process(real_transport: str) -> None:
    with Peer("source", real_transport) as peer, a_sink(real_transport) as sink:
        for handover_id in ("a", "b", "c"):
            hand_over(peer, sink, handover_id=handover_id)


def test_source_killed_while_a_request_waits_fails_it_in_time(real_transport: str) -> None:
    with Peer("source", real_transport) as peer, a_sink(real_transport) as sink:
        hand_over(peer, sink)
        sink.sink.request("k", address_of(peer.ready[0]))
        peer.tell("echo")
        peer.expect("echo")
        peer.kill()
        failed = sink.failure(LOSS_LIMIT_S)
        assert (failed.handover_id, failed.reason, failed.blocks_safe) == ("k", "peer_lost", True)


def test_source_killed_during_a_read_fails_it_in_time(real_transport: str) -> None:
    num_blocks, block_bytes = 1025, 65536
    settings = TransferSettings(heartbeat_timeout_s=TIMEOUT_S)
    peer = Peer("source", real_transport, num_blocks=num_blocks, block_bytes=block_bytes)
    with peer, a_sink(real_transport, settings, Pool(num_blocks, block_bytes)) as sink:
        sink.sink.request("h", address_of(peer.ready[0]))
        peer.tell("offer", "h", 4096, list(range(1, num_blocks)))
        sink.event()
        peer.stop()  # it confirms nothing before it is killed
        sink.sink.pull("h", list(range(1, num_blocks)))
        until_s = time.monotonic() + TIMEOUT_S
        while not sink.sink.stats().counts_by_stage.get("queue"):
            assert time.monotonic() < until_s, "the read does not begin"
        peer.kill()
        failed = sink.failure(LOSS_LIMIT_S)
        assert (failed.reason, failed.blocks_safe) == ("peer_lost", True)


def test_stopped_source_counts_as_lost_when_its_heartbeat_stops() -> None:
    with Peer("source", "zmq") as peer, a_sink("zmq") as sink:
        hand_over(peer, sink)
        sink.sink.request("k", address_of(peer.ready[0]))
        peer.tell("echo")
        peer.expect("echo")
        peer.stop()
        assert sink.failure(LOSS_LIMIT_S).reason == "peer_lost"


# A sink that dies


def test_killed_sink_costs_the_source_one_lease() -> None:
    """On a clock that stands still, so that no renewal is due before the death."""
    clock, settings = JumpingClock(), TransferSettings(lease_s=600.0)
    with a_source("zmq", settings=settings, clock=clock) as source, Peer("sink", "zmq") as peer:
        peer.tell("request", "h", "prompt-0", 1, source.source.control_address)
        source.source.offer(offer())
        peer.expect("Offered")
        peer.kill()
        assert source.source.stats().num_pinned == 1
        clock.jump(settings.lease_s)
        assert source.event() == Released("h", "expired")


def test_live_sink_keeps_a_lease_far_shorter_than_its_queue() -> None:
    settings = TransferSettings(lease_s=2.4)
    with a_source("zmq", settings=settings) as source, Peer("sink", "zmq") as peer:
        peer.tell("request", "h", "prompt-0", 1, source.source.control_address)
        source.source.offer(offer())
        peer.expect("Offered")
        until_s = time.monotonic() + TIMEOUT_S
        while source.source.stats().leases_renewed < 14:
            assert time.monotonic() < until_s
            assert peer.next_line(0.05) is None
        peer.tell("pull", "h", [7, 8])
        peer.expect("Arrived")
        assert source.event() == Released("h", "released")
