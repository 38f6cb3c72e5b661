"""A sink against messages that its source would not send at that moment."""

import numpy as np
import pytest

from kv_transfer.events import Arrived, Failed, Offered
from kv_transfer.messages import (
    Confirm,
    Ending,
    Grant,
    LeaseRef,
    LeaseTtl,
    Renewed,
    ToSink,
    Unavailable,
    encode,
)
from kv_transfer.sink_renewals import Renewals
from tests.kv_transfer.builders import FIRST, Pair

OFFERED = Offered("h", 6, 2)


@pytest.fixture
def pair() -> Pair:
    pair = Pair()
    pair.reader.request()
    pair.run()
    return pair


def tell(pair: Pair, message: ToSink) -> None:
    pair.reader.session.on_frames([encode(message)], pair.now_s)
    pair.check_invariants()


def grant(
    block_ids: tuple[int, ...] = (3, 5), num_tokens: int = 6, slot: int | None = None, generation: int = 1
) -> Grant:
    return Grant(
        1, "h", generation, 10.0, num_tokens, np.array(block_ids, "<i4").tobytes(), Ending(slot, FIRST)
    )


def confirming(pair: Pair) -> None:
    """The release of generation 1 is under way."""
    tell(pair, grant())
    pair.reader.to_source.hold = True
    pair.reader.pull()
    pair.run()
    pair.reader.take_events()


@pytest.mark.parametrize(
    "wrong",
    [
        grant(block_ids=(3,)),
        grant(block_ids=(3, 5, 6)),
        grant(num_tokens=0, block_ids=()),
        grant(block_ids=(0, 5)),
        grant(block_ids=(3, 16)),
        grant(block_ids=(-1, 5)),
        grant(block_ids=(3, 3)),
        grant(slot=4),
        Grant(1, "h", 1, 10.0, 6, b"12345", Ending(None, FIRST)),
    ],
)
def test_offer_that_contradicts_the_layout_fails_the_request(pair: Pair, wrong: Grant) -> None:
    tell(pair, wrong)
    (failed,) = pair.reader.take_events()
    assert isinstance(failed, Failed)
    assert (failed.reason, failed.blocks_safe) == ("bad_offer", True)


def test_grant_without_a_generation_is_ignored(pair: Pair) -> None:
    tell(pair, grant(generation=0))
    assert pair.reader.take_events() == []
    assert pair.reader.counters.ignored == {"invalid": 1}


def test_duplicate_and_unasked_grants_are_counted_and_ignored(pair: Pair) -> None:
    tell(pair, grant())
    tell(pair, grant(generation=2))
    tell(pair, Grant(1, "unasked", 1, 10.0, 6, b"", Ending(None, FIRST)))
    assert pair.reader.take_events() == [OFFERED]
    assert pair.reader.counters.ignored == {"duplicate": 1, "unknown": 1}


def test_other_generations_end_is_ignored(pair: Pair) -> None:
    tell(pair, grant(generation=3))
    for generation in (0, 2, 4):
        tell(pair, Unavailable(1, "h", generation, "superseded"))
    assert pair.reader.take_events() == [OFFERED]
    assert pair.reader.counters.ignored == {"stale": 3}


def test_only_its_own_generations_confirmation_counts(pair: Pair) -> None:
    confirming(pair)
    for generation in (0, 2):
        tell(pair, Confirm(1, "h", generation, True, "released"))
    assert pair.reader.take_events() == []
    tell(pair, Confirm(1, "h", 1, True, "released"))
    assert pair.reader.take_events() == [Arrived("h", FIRST)]


def test_confirmation_before_the_release_is_ignored(pair: Pair) -> None:
    tell(pair, grant())
    tell(pair, Confirm(1, "h", 1, True, "released"))
    assert pair.reader.take_events() == [OFFERED]


def test_other_epochs_messages_are_ignored(pair: Pair) -> None:
    confirming(pair)
    tell(pair, Confirm(2, "h", 1, True, "released"))
    assert pair.reader.take_events() == []
    assert pair.reader.counters.ignored == {"stale": 1}


def test_renewal_runs_from_when_it_was_asked_for() -> None:
    renewals = Renewals(lease_s=6.0, now_s=0.0)
    held, gone = LeaseRef("held", 1), LeaseRef("gone", 2)
    assert (renewals.is_due(0.9), renewals.is_due(1.0)) == (False, True)
    assert list(renewals.send([held, gone], 1.0)) == [(1, [held, gone])]
    assert renewals.answered(Renewed(1, 1, [LeaseTtl("held", 1, 6.0)])) == [(held, 7.0), (gone, None)]
    assert renewals.answered(Renewed(1, 1, [])) is None


def test_source_that_leaves_a_renewal_unanswered_for_a_lease_is_overdue() -> None:
    renewals = Renewals(lease_s=6.0, now_s=0.0)
    list(renewals.send([LeaseRef("h", 1)], 1.0))
    list(renewals.send([LeaseRef("h", 1)], 2.0))
    renewals.answered(Renewed(1, 2, []))
    assert (renewals.is_overdue(6.9), renewals.is_overdue(7.0)) == (False, True)


def test_leases_over_the_message_limit_are_split() -> None:
    renewals = Renewals(lease_s=6.0, now_s=0.0)
    leases = [LeaseRef(f"h{index}", 1) for index in range(5000)]
    assert [(sequence, len(part)) for sequence, part in renewals.send(leases, 0.0)] == [(1, 4096), (2, 904)]
