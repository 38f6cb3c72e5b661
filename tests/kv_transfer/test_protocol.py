"""Source and sink together, message by message, on a clock that only the test moves."""

import pytest

from kv_transfer.events import Arrived, Failed, Offered, Reclaimable, Released
from kv_transfer.layout import Identity
from kv_transfer.messages import PROTOCOL_VERSION, Hello, encode
from kv_transfer.settings import TransferSettings
from tests.kv_transfer.builders import COMPATIBILITY, FIRST, Pair, identity, offer
from wire.services import PromptEngineAddress

OFFERED = Offered("h", 6, 2)
LEASE_S = TransferSettings().lease_s


@pytest.fixture
def pair() -> Pair:
    return Pair()


def offered(pair: Pair) -> None:
    pair.reader.request()
    pair.offer()
    pair.run()
    assert pair.reader.take_events() == [OFFERED]


def reading(pair: Pair) -> None:
    offered(pair)
    pair.reader.transport.stalled = True
    pair.reader.pull()
    pair.run()


def failure(pair: Pair) -> Failed:
    (event,) = pair.reader.take_events()
    assert isinstance(event, Failed)
    return event


# The straight way


def test_blocks_arrive_once_the_release_is_confirmed(pair: Pair) -> None:
    offered(pair)
    pair.reader.pull((7, 8))
    pair.run()
    assert pair.reader.take_events() == [Arrived("h", FIRST)]
    assert pair.take_events() == [Released("h", "released")]
    assert pair.reader.pool.holds((7, 8), (3, 5))


def test_offer_before_request_is_granted_at_once(pair: Pair) -> None:
    pair.offer()
    pair.run()
    pair.reader.request()
    pair.run()
    assert pair.reader.take_events() == [OFFERED]


def test_request_before_offer_waits(pair: Pair) -> None:
    pair.reader.request()
    pair.run()
    assert pair.reader.take_events() == []
    pair.offer()
    pair.run()
    assert pair.reader.take_events() == [OFFERED]


def test_reader_skips_blocks_it_has(pair: Pair) -> None:
    offered(pair)
    pair.reader.pull((8,), first_block=1)
    pair.run()
    assert pair.reader.take_events() == [Arrived("h", FIRST)]
    assert pair.reader.pool.holds((8,), (5,))


def test_reader_that_has_every_block_moves_nothing(pair: Pair) -> None:
    offered(pair)
    pair.reader.pull((), first_block=2)
    pair.run()
    assert pair.reader.take_events() == [Arrived("h", FIRST)]
    assert pair.reader.counters.bytes_read == 0


def test_state_slot_moves_with_the_blocks(pair: Pair) -> None:
    pair.reader.request()
    pair.offer(offer(slot=2))
    pair.run()
    assert pair.reader.take_events() == [Offered("h", 6, 2)]
    pair.reader.pull((7, 8), slot=1)
    pair.run()
    assert pair.reader.take_events() == [Arrived("h", FIRST)]
    assert pair.reader.pool.state[:, 0].tolist() == [0, 103, 0, 0]


def test_many_handovers_share_one_session(pair: Pair) -> None:
    for index in range(5):
        pair.reader.request(f"h{index}")
        pair.offer(offer(f"h{index}", 4, (index + 1,)))
    pair.run()
    for index in range(5):
        pair.reader.pull((index + 6,), f"h{index}")
    pair.run()
    assert pair.reader.take_events()[5:] == [Arrived(f"h{index}", FIRST) for index in range(5)]
    assert pair.reader.pool.holds(range(6, 11), range(1, 6))


# The wrong number of blocks


@pytest.mark.parametrize(
    ("local_ids", "skip"), [((7,), 0), ((7, 8, 9), 0), ((7,), 2), ((7, 7), 0), ((0, 1), 0)]
)
def test_pull_that_does_not_fit_the_offer_fails(pair: Pair, local_ids: tuple[int, ...], skip: int) -> None:
    offered(pair)
    pair.reader.pull(local_ids, first_block=skip)
    pair.run()
    assert failure(pair).reason == "bad_pull"
    assert not pair.reader.pool.kv.any()
    assert pair.take_events() == [Released("h", "abandoned")]


def test_state_slot_without_a_destination_fails(pair: Pair) -> None:
    pair.reader.request()
    pair.offer(offer(slot=0))
    pair.run()
    pair.reader.take_events()
    pair.reader.pull((7, 8))
    pair.run()
    assert failure(pair).reason == "bad_pull"


# Withdrawal


def test_withdrawn_before_the_offer_turns_the_waiter_away(pair: Pair) -> None:
    pair.reader.request()
    pair.run()
    pair.withdraw()
    pair.run()
    assert failure(pair).reason == "withdrawn"
    assert pair.take_events() == []


def test_withdrawn_before_the_request_turns_the_reader_away(pair: Pair) -> None:
    pair.withdraw()
    pair.reader.request()
    pair.run()
    assert failure(pair).reason == "withdrawn"


def test_withdrawn_while_nobody_reads_is_released_at_once(pair: Pair) -> None:
    pair.offer()
    pair.withdraw()
    assert pair.take_events() == [Released("h", "withdrawn")]


def test_withdrawn_while_granted_is_released_when_the_reader_lets_go(pair: Pair) -> None:
    offered(pair)
    pair.withdraw()
    assert pair.take_events() == []
    pair.run()
    assert failure(pair).reason == "withdrawn"
    assert pair.take_events() == [Released("h", "withdrawn")]


def test_withdrawn_under_a_dead_reader_is_released_at_the_end_of_its_lease(pair: Pair) -> None:
    offered(pair)
    pair.reader.to_source.cut = True
    pair.withdraw()
    pair.advance(LEASE_S - 0.2)
    assert pair.take_events() == []
    pair.advance(0.3)
    assert pair.take_events() == [Released("h", "withdrawn")]


def test_withdrawn_while_the_release_is_under_way_never_arrives(pair: Pair) -> None:
    offered(pair)
    pair.reader.to_source.hold = True
    pair.reader.pull()
    pair.run()
    pair.withdraw()
    pair.reader.to_sink.frames.clear()
    pair.reader.to_source.hold = False
    pair.run()
    assert "did not confirm: withdrawn" in failure(pair).message
    assert pair.take_events() == [Released("h", "withdrawn")]


# Abandoned at every stage


def test_abandoned_before_the_hello_still_frees_the_source(pair: Pair) -> None:
    pair.reader.request()
    pair.reader.abandon()
    assert pair.reader.take_events() == [Reclaimable("h")]
    pair.run()
    pair.offer()
    assert pair.take_events() == [Released("h", "abandoned")]


def test_abandoned_while_waiting_frees_a_later_offer_at_once(pair: Pair) -> None:
    pair.reader.request()
    pair.run()
    pair.reader.abandon()
    pair.run()
    pair.offer()
    assert pair.reader.take_events() == [Reclaimable("h")]
    assert pair.take_events() == [Released("h", "abandoned")]


def test_abandoned_while_the_grant_is_under_way_frees_the_source(pair: Pair) -> None:
    pair.reader.request()
    pair.run()
    pair.reader.to_sink.hold = True
    pair.offer()
    pair.reader.abandon()
    pair.run()
    pair.reader.to_sink.hold = False
    pair.run()
    assert pair.reader.take_events() == [Reclaimable("h")]
    assert pair.take_events() == [Released("h", "abandoned")]


def test_abandoned_after_the_offer_frees_the_source(pair: Pair) -> None:
    offered(pair)
    pair.reader.abandon()
    pair.run()
    assert pair.reader.take_events() == [Reclaimable("h")]
    assert pair.take_events() == [Released("h", "abandoned")]


def test_abandoned_during_a_read_that_can_be_cancelled_is_reclaimable_at_once(pair: Pair) -> None:
    offered(pair)
    pair.reader.pull()
    pair.reader.abandon()
    pair.run()
    assert pair.reader.take_events() == [Reclaimable("h")]
    assert pair.take_events() == [Released("h", "abandoned")]
    assert not pair.reader.pool.kv.any()


def test_abandoned_during_a_stuck_read_quarantines_until_the_read_ends(pair: Pair) -> None:
    reading(pair)
    pair.reader.abandon()
    pair.run()
    assert pair.reader.take_events() == []
    assert pair.reader.session.num_quarantined_blocks == 2
    assert pair.take_events() == [Released("h", "abandoned")]
    pair.reader.transport.stalled = False
    pair.run()
    assert pair.reader.take_events() == [Reclaimable("h")]
    assert pair.reader.session.num_quarantined_blocks == 0


def test_abandoned_while_confirming_is_reclaimable(pair: Pair) -> None:
    offered(pair)
    pair.reader.to_source.hold = True
    pair.reader.pull()
    pair.run()
    pair.reader.abandon()
    pair.reader.to_source.hold = False
    pair.run()
    assert pair.reader.take_events() == [Reclaimable("h")]
    assert pair.take_events() == [Released("h", "released")]


def test_abandon_is_idempotent_and_ignored_after_the_end(pair: Pair) -> None:
    offered(pair)
    pair.reader.abandon()
    pair.reader.abandon()
    pair.reader.abandon("unknown")
    pair.run()
    assert pair.reader.take_events() == [Reclaimable("h")]


# Leases


def test_lease_of_an_offer_nobody_asks_for_expires(pair: Pair) -> None:
    pair.offer()
    pair.advance(LEASE_S + 0.1)
    assert pair.take_events() == [Released("h", "expired")]
    pair.reader.request()
    pair.run()
    assert failure(pair).reason == "expired"


def test_live_reader_may_queue_ten_times_the_lease(pair: Pair) -> None:
    offered(pair)
    pair.advance(10 * LEASE_S)
    assert pair.take_events() == []
    pair.reader.pull()
    pair.run()
    assert pair.reader.take_events() == [Arrived("h", FIRST)]


def test_live_reader_may_wait_ten_times_the_lease_for_the_offer(pair: Pair) -> None:
    pair.reader.request(deadline_s=1000)
    pair.advance(10 * LEASE_S)
    assert pair.source.ledger.num_waiting == 1
    pair.offer()
    pair.run()
    assert pair.reader.take_events() == [OFFERED]


def test_silent_reader_loses_its_lease_and_fails_loudly(pair: Pair) -> None:
    offered(pair)
    pair.reader.to_source.cut = True
    pair.advance(LEASE_S + 0.2)
    assert pair.take_events() == [Released("h", "expired")]
    assert failure(pair).reason == "expired"


def test_reader_that_is_cut_off_gives_up_at_the_end_of_its_lease(pair: Pair) -> None:
    offered(pair)
    pair.reader.to_source.cut = pair.reader.to_sink.cut = True
    pair.advance(LEASE_S + 0.1)
    assert failure(pair).reason == "expired"
    assert pair.take_events() == [Released("h", "expired")]


def test_release_of_an_expired_lease_is_not_confirmed(pair: Pair) -> None:
    """The blocks may be someone else's by then: what was read must never yield a token."""
    offered(pair)
    pair.reader.to_source.hold = True
    pair.reader.pull()
    pair.run()
    pair.source.ledger.expire(pair.now_s + LEASE_S)
    assert pair.take_events() == [Released("h", "expired")]
    pair.reader.to_source.hold = False
    pair.reader.to_sink.frames.clear()
    pair.run()
    assert failure(pair).reason == "expired"
    assert pair.source.counters.late_releases == 1


def test_lease_expires_at_the_release_even_before_the_next_scan(pair: Pair) -> None:
    offered(pair)
    pair.reader.to_source.hold = True
    pair.reader.pull()
    pair.run()
    pair.now_s += LEASE_S
    pair.reader.to_source.hold = False
    pair.run()
    assert failure(pair).reason == "expired"
    assert pair.take_events() == [Released("h", "expired")]


def test_every_lease_is_scanned_not_only_the_first(pair: Pair) -> None:
    pair.offer(offer("old", 4, (1,)))
    pair.now_s += LEASE_S / 2
    pair.offer(offer("new", 4, (2,)))
    pair.offer(offer("newer", 4, (4,)))
    pair.source.ledger.withdraw("newer", pair.now_s)
    pair.take_events()
    pair.advance(LEASE_S / 2 + 0.1)
    assert pair.take_events() == [Released("old", "expired")]


def test_expiry_during_a_stuck_read_quarantines_the_destination(pair: Pair) -> None:
    reading(pair)
    pair.reader.to_source.cut = True
    pair.advance(LEASE_S + 0.2)
    assert pair.take_events() == [Released("h", "expired")]
    events = pair.reader.take_events()
    assert isinstance(events[0], Failed)
    assert not events[0].blocks_safe
    assert events[0].reason in ("expired", "read_timeout")


# Takeover


def test_second_reader_takes_over_and_the_first_is_never_confirmed(pair: Pair) -> None:
    offered(pair)
    first, second = pair.reader, pair.add_reader()
    first.to_sink.hold = True
    second.request()
    pair.run()
    assert second.take_events() == [OFFERED]
    first.pull()
    pair.run()
    first.to_sink.hold = False
    pair.run()
    assert failure(pair).reason == "superseded"
    assert pair.take_events() == []
    second.pull()
    pair.run()
    assert second.take_events() == [Arrived("h", FIRST)]
    assert pair.take_events() == [Released("h", "released")]


def test_reader_of_a_released_handover_is_turned_away(pair: Pair) -> None:
    offered(pair)
    pair.reader.pull()
    pair.run()
    late = pair.add_reader()
    late.request()
    pair.run()
    (event,) = late.take_events()
    assert isinstance(event, Failed)
    assert event.reason == "superseded"


def test_new_reader_may_wait_for_what_another_gave_up_before_the_offer(pair: Pair) -> None:
    pair.reader.request()
    pair.run()
    pair.reader.abandon()
    second = pair.add_reader()
    second.request()
    pair.run()
    pair.offer()
    pair.run()
    assert second.take_events() == [OFFERED]
    assert pair.take_events() == []


# Deadlines and dead peers


def test_offer_that_does_not_come_in_time_fails(pair: Pair) -> None:
    pair.reader.request(deadline_s=3)
    pair.advance(3.1)
    assert failure(pair).reason == "offer_timeout"
    pair.offer()
    assert pair.take_events() == [Released("h", "abandoned")]


def test_read_that_does_not_end_fails_unsafe_then_fences_the_peer(pair: Pair) -> None:
    reading(pair)
    pair.advance(TransferSettings().read_timeout_s + 0.2)
    failed = failure(pair)
    assert (failed.reason, failed.blocks_safe) == ("read_timeout", False)
    assert pair.take_events() == [Released("h", "abandoned")]
    pair.advance(TransferSettings().fence_after_s + 0.2)
    assert pair.reader.take_events() == [Reclaimable("h")]
    assert (pair.reader.session.is_lost, pair.reader.transport.num_open) == (True, 0)
    assert pair.reader.counters.fences == 1


def test_read_error_fails_safely_and_frees_the_source(pair: Pair) -> None:
    offered(pair)
    pair.reader.transport.next_error = "checksum"
    pair.reader.pull()
    pair.run()
    failed = failure(pair)
    assert (failed.reason, failed.blocks_safe) == ("read_failed", True)
    assert "checksum" in failed.message
    assert pair.take_events() == [Released("h", "abandoned")]


def test_confirmation_that_does_not_come_fails(pair: Pair) -> None:
    offered(pair)
    pair.reader.pull()
    pair.reader.to_source.cut = True
    pair.run()
    pair.advance(TransferSettings().confirm_timeout_s + 0.2)
    failed = failure(pair)
    assert (failed.reason, failed.blocks_safe) == ("confirm_timeout", True)


def test_lost_peer_fails_every_handover_and_frees_quarantine(pair: Pair) -> None:
    reading(pair)
    pair.reader.abandon()
    pair.reader.request("other")
    pair.run()
    pair.reader.session.lose("peer_lost", "gone", pair.now_s)
    stuck, other = pair.reader.take_events()
    assert stuck == Reclaimable("h")
    assert isinstance(other, Failed)
    assert (other.handover_id, other.reason, other.blocks_safe) == ("other", "peer_lost", True)
    assert pair.reader.transport.num_open == 0


def test_source_that_stops_answering_is_lost_within_a_lease(pair: Pair) -> None:
    pair.reader.request(deadline_s=1000)
    pair.run()
    pair.reader.to_sink.cut = True
    pair.advance(LEASE_S * 7 / 6 + 0.3)
    assert failure(pair).reason == "peer_lost"


def test_hello_without_an_answer_fails(pair: Pair) -> None:
    pair.reader.to_source.cut = True
    pair.reader.to_source.frames.clear()
    pair.reader.request()
    pair.advance(TransferSettings().connect_timeout_s + 0.1)
    assert failure(pair).reason == "connect_failed"


def test_closing_sink_releases_what_it_holds(pair: Pair) -> None:
    offered(pair)
    pair.reader.session.close(pair.now_s)
    for frame in pair.reader.to_source.take():
        pair.source.on_frames(pair.reader.reader_id, [frame], pair.now_s)
    assert failure(pair).reason == "closed"
    assert pair.take_events() == [Released("h", "abandoned")]


# Hello


@pytest.mark.parametrize(
    ("field", "here", "there"),
    [("dtype", "float16", "float32"), ("block_size", "6", "4"), ("model", "other", "tiny")],
)
def test_incompatible_engines_refuse_each_other_by_field(field: str, here: str, there: str) -> None:
    pair = Pair(source_identity=Identity("prompt-0", 1, COMPATIBILITY | {field: here}))
    pair.reader.request()
    pair.run()
    failed = failure(pair)
    assert failed.reason == "incompatible"
    assert f"{field} is {here} there and {there} here" in failed.message


def test_field_only_one_side_knows_is_a_difference() -> None:
    pair = Pair(source_identity=identity(tp="2"))
    pair.reader.request()
    pair.run()
    assert "tp is 2 there and (absent) here" in failure(pair).message


@pytest.mark.parametrize(
    ("engine_id", "epoch", "text"),
    [
        ("prompt-1", 1, "engine_id is prompt-0 there and prompt-1 here"),
        ("prompt-0", 2, "epoch is 1 there and 2 here"),
    ],
)
def test_other_engine_at_the_address_is_refused(engine_id: str, epoch: int, text: str) -> None:
    pair = Pair()
    reader = pair.add_reader(
        PromptEngineAddress(engine_id=engine_id, epoch=epoch, control_address="inproc://control")
    )
    reader.request()
    pair.run()
    (failed,) = reader.take_events()
    assert isinstance(failed, Failed)
    assert failed.reason == "wrong_engine"
    assert text in failed.message


def test_restarted_source_drops_the_old_epochs_messages() -> None:
    pair = Pair()
    offered(pair)
    pair.identity = identity(epoch=2)
    pair.source = pair._new_source()
    pair.reader.pull()
    pair.run()
    assert pair.source.counters.ignored["stale"] == 1
    assert failure(pair).reason == "wrong_engine"
    fresh = pair.add_reader(pair.address())
    fresh.request()
    pair.offer()
    pair.run()
    assert fresh.take_events() == [OFFERED]


def test_strangers_who_only_say_hello_cost_no_reader_its_session(pair: Pair) -> None:
    offered(pair)
    hello = encode(Hello(1, PROTOCOL_VERSION, dict(identity().compatibility)))
    for number in range(TransferSettings().max_peers + 1):
        pair.source.on_frames(b"stranger-%d" % number, [hello], pair.now_s)
    pair.advance(LEASE_S / 2)
    pair.reader.pull((7, 8))
    pair.run()
    assert pair.reader.take_events() == [Arrived("h", FIRST)]


def test_silently_reconnected_reader_learns_that_its_session_is_gone(pair: Pair) -> None:
    offered(pair)
    pair.source = pair._new_source()
    pair.reader.pull()
    pair.run()
    assert failure(pair).reason == "peer_lost"


def test_t9_a_time_out_inside_a_time_out_ends(pair: Pair) -> None:
    """A read times out, its quarantine times out, and what waits behind it times out or goes on meanwhile."""
    pair.reader.request("stuck")
    pair.reader.request("late", deadline_s=8.0)
    pair.offer(offer("stuck"))
    pair.run()
    pair.reader.transport.stalled = True
    pair.reader.pull(handover_id="stuck")
    pair.advance(6.0)
    assert pair.reader.session.num_quarantined_blocks == 2
    pair.offer(offer("behind", block_ids=(6, 7)))
    pair.reader.request("behind")
    pair.advance(3.0)
    found = {
        event.handover_id: event.reason for event in pair.reader.take_events() if isinstance(event, Failed)
    }
    assert found == {"stuck": "read_timeout", "late": "offer_timeout"}
    pair.advance(pair.settings.fence_after_s)
    assert pair.reader.session.is_lost
    last = {event.handover_id: event for event in pair.reader.take_events()}
    assert isinstance(last["stuck"], Reclaimable)
    assert isinstance(last["behind"], Failed)
    assert pair.reader.session.num_handovers == 0
