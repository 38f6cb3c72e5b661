"""Prompts that are read while they are computed, message by message, on a clock that only the test moves."""

from dataclasses import replace

import numpy as np
import pytest

from kv_transfer.errors import LayoutError
from kv_transfer.events import Arrived, Failed, Offered, Reclaimable, Released
from kv_transfer.messages import Announce, Ending, Release, encode
from kv_transfer.offers import Offer
from kv_transfer.settings import TransferSettings
from tests.kv_transfer.builders import FIRST, Pair, Reader, offer

NUM_TOKENS = 18
SOURCE_BLOCKS = (3, 5, 9, 2, 4)
"""Of 18 tokens in blocks of 4: four whole ones and a begun one."""
LOCAL_BLOCKS = (7, 8, 10, 1, 12)
OFFERED = Offered("h", NUM_TOKENS, 5)
LEASE_S = TransferSettings().lease_s


@pytest.fixture
def pair() -> Pair:
    pair = Pair()
    pair.reader.request()
    pair.run()
    return pair


def announce(pair: Pair, num_blocks: int) -> None:
    pair.announce(SOURCE_BLOCKS[:num_blocks], NUM_TOKENS)
    pair.run()


def whole(slot: int | None = None) -> Offer:
    return offer("h", NUM_TOKENS, SOURCE_BLOCKS, slot)


def complete(pair: Pair) -> None:
    pair.offer(whole())
    pair.run()


def pulling(pair: Pair) -> None:
    """Two blocks are announced and read."""
    announce(pair, 2)
    assert pair.reader.take_events() == [OFFERED]
    pair.reader.pull(LOCAL_BLOCKS)
    pair.run()


def failure(reader: Reader) -> Failed:
    (event,) = reader.take_events()
    assert isinstance(event, Failed)
    return event


# The straight way


def test_announced_blocks_are_read_before_the_prompt_is_whole(pair: Pair) -> None:
    pulling(pair)
    assert pair.reader.pool.holds(LOCAL_BLOCKS[:2], SOURCE_BLOCKS[:2])
    announce(pair, 4)
    assert pair.reader.pool.holds(LOCAL_BLOCKS[:4], SOURCE_BLOCKS[:4])
    assert pair.reader.take_events() == []
    complete(pair)
    assert pair.reader.pool.holds(LOCAL_BLOCKS, SOURCE_BLOCKS)
    assert pair.reader.take_events() == [Arrived("h", FIRST)]
    assert pair.take_events() == [Released("h", "released")]


def test_chunk_that_ends_inside_an_announced_block_changes_nothing(pair: Pair) -> None:
    pulling(pair)
    announce(pair, 2)
    complete(pair)
    assert pair.reader.take_events() == [Arrived("h", FIRST)]
    assert pair.reader.pool.holds(LOCAL_BLOCKS, SOURCE_BLOCKS)


def test_every_chunk_is_one_read(pair: Pair) -> None:
    pulling(pair)
    announce(pair, 4)
    complete(pair)
    assert pair.reader.transport.num_reads == 3


def test_reader_that_finds_room_late_reads_all_chunks_so_far_together(pair: Pair) -> None:
    announce(pair, 2)
    announce(pair, 4)
    pair.reader.pull(LOCAL_BLOCKS)
    pair.run()
    assert pair.reader.transport.num_reads == 1
    complete(pair)
    assert pair.reader.take_events() == [OFFERED, Arrived("h", FIRST)]


def test_request_in_the_middle_is_granted_what_is_computed_so_far(pair: Pair) -> None:
    announce(pair, 2)
    late = pair.add_reader()
    late.request()
    pair.run()
    assert late.take_events() == [OFFERED]


def test_state_slot_moves_last_and_together_with_the_last_blocks(pair: Pair) -> None:
    announce(pair, 4)
    pair.reader.pull(LOCAL_BLOCKS, slot=1)
    pair.run()
    assert not pair.reader.pool.state.any()
    pair.offer(whole(slot=2))
    pair.run()
    assert pair.reader.take_events() == [OFFERED, Arrived("h", FIRST)]
    assert pair.reader.pool.state[:, 0].tolist() == [0, 103, 0, 0]
    assert pair.reader.transport.num_reads == 2


def test_blocks_the_reader_has_are_skipped_over_all_chunks(pair: Pair) -> None:
    announce(pair, 2)
    pair.reader.pull(LOCAL_BLOCKS[3:], first_block=3)
    announce(pair, 4)
    complete(pair)
    assert pair.reader.take_events() == [OFFERED, Arrived("h", FIRST)]
    assert pair.reader.pool.holds(LOCAL_BLOCKS[3:], SOURCE_BLOCKS[3:])
    counters = pair.reader.counters
    assert (counters.blocks_read, counters.blocks_skipped) == (2, 3)
    assert (counters.bytes_read, counters.bytes_skipped) == (2 * 4096, 3 * 4096)


def test_reader_that_has_every_block_waits_for_the_first_tokens_and_reads_nothing(pair: Pair) -> None:
    announce(pair, 4)
    pair.reader.pull((), first_block=5)
    pair.run()
    assert pair.reader.take_events() == [OFFERED]
    complete(pair)
    assert pair.reader.take_events() == [Arrived("h", FIRST)]
    assert pair.reader.transport.num_reads == 0
    assert pair.take_events() == [Released("h", "released")]


def test_whole_prompt_is_not_confirmed_before_its_last_read_is_in(pair: Pair) -> None:
    pulling(pair)
    pair.reader.transport.stalled = True
    complete(pair)
    assert (pair.reader.take_events(), pair.take_events()) == ([], [])
    pair.reader.transport.stalled = False
    pair.run()
    assert pair.reader.take_events() == [Arrived("h", FIRST)]


# Given up in the middle


def test_withdrawn_in_the_middle_turns_the_reader_away_and_reports_nothing_to_the_engine(pair: Pair) -> None:
    """The first token ended the request, or its client left: the blocks are the scheduler's already."""
    pulling(pair)
    pair.withdraw()
    pair.run()
    failed = failure(pair.reader)
    assert (failed.reason, failed.blocks_safe) == ("withdrawn", True)
    assert pair.take_events() == []
    assert (pair.source.ledger.num_pinned, pair.source.counters.late_releases) == (0, 0)


def test_withdrawn_in_the_middle_of_a_stuck_read_quarantines_the_destination(pair: Pair) -> None:
    pair.reader.transport.stalled = True
    pulling(pair)
    pair.withdraw()
    pair.run()
    assert not failure(pair.reader).blocks_safe
    pair.reader.transport.stalled = False
    pair.run()
    assert pair.reader.take_events() == [Reclaimable("h")]


@pytest.mark.parametrize("num_chunks", [0, 1, 2])
def test_two_stuck_reads_are_reclaimable_only_when_both_are_over(pair: Pair, num_chunks: int) -> None:
    pair.reader.transport.stalled = True
    pulling(pair)
    announce(pair, 4)
    pair.reader.abandon()
    pair.run()
    for _ in range(num_chunks):
        pair.reader.transport.finish_one()
        pair.run()
    expected = [Reclaimable("h")] if num_chunks == 2 else []
    assert pair.reader.take_events() == expected


def test_abandoned_in_the_middle_ends_the_offer_at_once(pair: Pair) -> None:
    pulling(pair)
    pair.reader.abandon()
    pair.run()
    assert pair.reader.take_events() == [Reclaimable("h")]
    announce(pair, 4)
    complete(pair)
    assert pair.take_events() == [Released("h", "abandoned")]


def test_new_reader_may_take_what_another_gave_up_in_the_middle(pair: Pair) -> None:
    pulling(pair)
    pair.reader.abandon()
    second = pair.add_reader()
    second.request()
    pair.run()
    complete(pair)
    assert second.take_events() == [OFFERED]
    second.pull(LOCAL_BLOCKS)
    pair.run()
    assert second.take_events() == [Arrived("h", FIRST)]


def test_reader_that_dies_in_the_middle_costs_the_computed_prompt_one_lease(pair: Pair) -> None:
    pulling(pair)
    pair.reader.to_source.cut = True
    pair.advance(LEASE_S + 0.2)
    assert failure(pair.reader).reason == "expired"
    assert pair.take_events() == []
    complete(pair)
    pair.advance(LEASE_S + 0.1)
    assert pair.take_events() == [Released("h", "expired")]


def test_living_reader_may_wait_ten_times_the_lease_for_the_next_chunk(pair: Pair) -> None:
    pulling(pair)
    pair.advance(5 * LEASE_S)
    complete(pair)
    assert pair.reader.take_events() == [Arrived("h", FIRST)]


def test_source_that_dies_in_the_middle_fails_the_handover_and_its_blocks_are_safe(pair: Pair) -> None:
    pulling(pair)
    pair.reader.session.lose("peer_lost", "gone", pair.now_s)
    failed = failure(pair.reader)
    assert (failed.reason, failed.blocks_safe) == ("peer_lost", True)


def test_rest_of_a_prompt_that_does_not_come_in_time_fails(pair: Pair) -> None:
    second = pair.add_reader()
    second.request("k", deadline_s=5)
    pair.announce(SOURCE_BLOCKS[:2], NUM_TOKENS, "k")
    pair.run()
    second.take_events()
    second.pull(LOCAL_BLOCKS, "k")
    pair.advance(5.1)
    assert failure(second).reason == "offer_timeout"


def test_second_reader_takes_over_in_the_middle(pair: Pair) -> None:
    pulling(pair)
    second = pair.add_reader()
    second.request()
    pair.run()
    assert failure(pair.reader).reason == "superseded"
    complete(pair)
    second.pull(LOCAL_BLOCKS)
    pair.run()
    assert second.take_events() == [OFFERED, Arrived("h", FIRST)]


def test_prompt_that_is_computed_again_in_the_same_blocks_voids_what_was_announced(pair: Pair) -> None:
    """They were another prompt's meanwhile, and may have been read then."""
    pulling(pair)
    pair.announce(SOURCE_BLOCKS[:2], NUM_TOKENS, attempt=1)
    pair.run()
    assert failure(pair.reader).reason == "superseded"
    second = pair.add_reader()
    second.request()
    pair.run()
    second.pull(LOCAL_BLOCKS)
    pair.offer(replace(offer("h", NUM_TOKENS, SOURCE_BLOCKS), attempt=1))
    pair.run()
    assert isinstance(second.take_events()[-1], Arrived)


def test_prompt_that_is_computed_again_as_a_whole_voids_what_was_announced(pair: Pair) -> None:
    pulling(pair)
    pair.offer(replace(offer("h", NUM_TOKENS, SOURCE_BLOCKS), attempt=1))
    pair.run()
    assert failure(pair.reader).reason == "superseded"


def test_prompt_that_is_computed_again_elsewhere_voids_what_was_announced(pair: Pair) -> None:
    pulling(pair)
    pair.announce((6, 11), NUM_TOKENS)
    pair.run()
    assert failure(pair.reader).reason == "superseded"
    second = pair.add_reader()
    second.request()
    pair.run()
    second.pull(LOCAL_BLOCKS)
    pair.offer(offer("h", NUM_TOKENS, (6, 11, 9, 2, 4)))
    pair.run()
    assert second.take_events() == [OFFERED, Arrived("h", FIRST)]
    assert second.pool.holds(LOCAL_BLOCKS, (6, 11, 9, 2, 4))


def test_done_before_the_prompt_is_whole_is_never_confirmed(pair: Pair) -> None:
    pulling(pair)
    pair.source.on_frames(b"reader-0", [encode(Release(1, "h", 1, "done"))], pair.now_s)
    assert pair.source.counters.ignored == {"invalid": 1}
    complete(pair)
    assert pair.reader.take_events() == [Arrived("h", FIRST)]


# Declined: no room here


@pytest.mark.parametrize("is_whole", [False, True])
def test_declined_handover_is_kept_for_another_reader(pair: Pair, is_whole: bool) -> None:
    announce(pair, 2)
    if is_whole:
        complete(pair)
    pair.reader.decline()
    pair.run()
    assert pair.reader.take_events() == [OFFERED, Reclaimable("h")]
    assert pair.take_events() == []
    if not is_whole:
        complete(pair)
    second = pair.add_reader()
    second.request()
    pair.run()
    second.pull(LOCAL_BLOCKS)
    pair.run()
    assert second.take_events() == [OFFERED, Arrived("h", FIRST)]
    assert pair.take_events() == [Released("h", "released")]


def test_declined_handover_that_nobody_else_wants_is_released_after_one_lease(pair: Pair) -> None:
    complete(pair)
    pair.reader.decline()
    pair.run()
    pair.advance(LEASE_S - 0.2)
    assert pair.take_events() == []
    pair.advance(0.3)
    assert pair.take_events() == [Released("h", "expired")]


def test_declined_before_there_is_anything_to_read_leaves_no_mark(pair: Pair) -> None:
    pair.reader.decline()
    second = pair.add_reader()
    pair.run()
    complete(pair)
    second.request()
    pair.run()
    assert second.take_events() == [OFFERED]


# Announcements that cannot be


@pytest.mark.parametrize(
    ("first_block", "block_ids", "ending"),
    [
        (3, (9, 2, 4), None),
        (1, (9, 2, 4), None),
        (2, (), None),
        (2, (9, 2, 4, 6), None),
        (2, (3, 2, 4), None),
        (2, (0, 2, 4), None),
        (2, (16,), None),
        (2, (9, 2), Ending(None, FIRST)),
        (2, (9, 2, 4), Ending(9, FIRST)),
    ],
)
def test_announcement_that_contradicts_the_layout_fails_the_request(
    pair: Pair, first_block: int, block_ids: tuple[int, ...], ending: Ending | None
) -> None:
    pulling(pair)
    message = Announce(1, "h", 1, first_block, np.array(block_ids, "<i4").tobytes(), ending)
    pair.reader.session.on_frames([encode(message)], pair.now_s)
    pair.check_invariants()
    assert failure(pair.reader).reason == "bad_offer"


def test_announcement_of_another_generation_is_ignored(pair: Pair) -> None:
    pulling(pair)
    message = Announce(1, "h", 7, 2, np.array([9], "<i4").tobytes(), None)
    pair.reader.session.on_frames([encode(message)], pair.now_s)
    assert pair.reader.counters.ignored == {"stale": 1}


def test_state_slot_that_only_one_side_has_fails_at_the_end(pair: Pair) -> None:
    pulling(pair)
    pair.offer(whole(slot=2))
    pair.run()
    assert failure(pair.reader).reason == "bad_pull"


@pytest.mark.parametrize("block_ids", [(), (3, 5, 9, 2, 4), (0, 1), (3, 3), (3, 16)])
def test_engine_may_announce_only_whole_blocks_of_its_pool(pair: Pair, block_ids: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError):
        pair.announce(block_ids, NUM_TOKENS)
