"""Messages that an honest reader sends only when things have gone wrong."""

import pytest

from kv_transfer.events import Released, SourceEvent
from kv_transfer.layout import as_block_ids
from kv_transfer.messages import Confirm, Grant, LeaseRef, Release, Renew, Renewed, ToSink, Unavailable, Want
from kv_transfer.settings import TransferSettings
from kv_transfer.source_ledger import MAX_ENDED, ReaderId, SourceLedger
from kv_transfer.stats import SourceCounters
from tests.kv_transfer.builders import identity, offer

A, B = b"a", b"b"
LEASE_S = 6.0


class Source:
    def __init__(self, max_handovers: int = 100) -> None:
        self.sent: list[tuple[ReaderId, ToSink]] = []
        self.events: list[SourceEvent] = []
        self.counters = SourceCounters()
        self.ledger = SourceLedger(
            identity(),
            TransferSettings(lease_s=LEASE_S, max_handovers=max_handovers),
            self.counters,
            lambda reader, message: self.sent.append((reader, message)),
            self.events.append,
        )

    def offer(self, handover_id: str = "h", now_s: float = 0.0) -> None:
        item = offer(handover_id)
        self.ledger.offer(item, as_block_ids(item.block_ids), now_s)

    def want(self, reader: ReaderId, handover_id: str = "h", now_s: float = 0.0) -> None:
        self.ledger.want(reader, Want(1, handover_id), now_s)

    def renew(self, reader: ReaderId, generation: int, now_s: float, handover_id: str = "h") -> list[float]:
        self.ledger.renew(reader, Renew(1, 1, [LeaseRef(handover_id, generation)]), now_s)
        answer = self.sent[-1][1]
        assert isinstance(answer, Renewed)
        return [lease.ttl_s for lease in answer.leases]

    def release(
        self, reader: ReaderId, generation: int, outcome: str = "done", now_s: float = 0.0
    ) -> Confirm:
        self.ledger.release(
            reader, Release(1, "h", generation, "done" if outcome == "done" else "aborted"), now_s
        )
        answer = self.sent[-1][1]
        assert isinstance(answer, Confirm)
        return answer

    def granted(self) -> list[tuple[ReaderId, int]]:
        return [(reader, message.generation) for reader, message in self.sent if isinstance(message, Grant)]

    def turned_away(self) -> list[tuple[ReaderId, str]]:
        return [(reader, message.reason) for reader, message in self.sent if isinstance(message, Unavailable)]


@pytest.fixture
def source() -> Source:
    return Source()


def test_generations_are_never_used_twice(source: Source) -> None:
    for index in range(3):
        source.offer(f"h{index}")
        source.want(A, f"h{index}")
        source.want(B, f"h{index}")
    assert [generation for _, generation in source.granted()] == [1, 2, 3, 4, 5, 6]


def test_lease_is_renewed_only_by_its_reader_and_generation(source: Source) -> None:
    source.offer()
    source.want(A)
    source.want(B)
    assert source.renew(A, 1, now_s=5.0) == []
    assert source.renew(A, 2, now_s=5.0) == []
    assert source.renew(B, 1, now_s=5.0) == []
    source.ledger.expire(LEASE_S)
    assert source.events == [Released("h", "expired")]


def test_renewal_counts_from_its_arrival(source: Source) -> None:
    source.offer()
    source.want(A, now_s=1.0)
    assert source.renew(A, 1, now_s=6.0) == [LEASE_S]
    source.ledger.expire(11.9)
    assert source.events == []
    assert source.renew(A, 1, now_s=12.0) == []
    assert source.events == [Released("h", "expired")]


def test_renewal_that_crosses_the_grant_says_what_is_left(source: Source) -> None:
    source.want(A)
    source.offer(now_s=2.0)
    assert source.renew(A, 0, now_s=3.0) == [LEASE_S - 1.0]


def test_waiters_place_is_not_taken_by_a_former_waiters_renewal(source: Source) -> None:
    source.want(A)
    source.want(B)
    assert source.turned_away() == [(A, "superseded")]
    assert source.renew(A, 0, now_s=1.0) == []
    source.offer()
    assert source.granted() == [(B, 1)]


def test_waiter_that_is_silent_for_a_lease_is_forgotten(source: Source) -> None:
    source.want(A)
    source.ledger.expire(LEASE_S)
    source.offer(now_s=LEASE_S)
    assert source.granted() == []


def test_duplicate_want_is_granted_once(source: Source) -> None:
    source.offer()
    source.want(A)
    source.want(A)
    assert source.granted() == [(A, 1)]
    assert source.counters.ignored["duplicate"] == 1


def test_duplicate_release_is_confirmed_again(source: Source) -> None:
    source.offer()
    source.want(A)
    assert source.release(A, 1).confirmed
    assert source.release(A, 1).confirmed
    assert source.events == [Released("h", "released")]


@pytest.mark.parametrize(("reader", "generation"), [(A, 2), (B, 1), (B, 0)])
def test_release_of_a_lease_one_does_not_hold_changes_nothing(
    source: Source, reader: ReaderId, generation: int
) -> None:
    source.offer()
    source.want(A)
    answer = source.release(reader, generation)
    assert (answer.confirmed, source.events) == (False, [])


def test_done_without_a_generation_is_never_confirmed(source: Source) -> None:
    source.offer()
    source.want(A)
    assert not source.release(A, 0).confirmed


def test_abort_after_the_release_is_not_confirmed(source: Source) -> None:
    source.offer()
    source.want(A)
    source.release(A, 1)
    assert not source.release(A, 1, "aborted").confirmed


def test_release_of_an_unknown_handover_is_answered_and_remembers_nothing(source: Source) -> None:
    assert source.release(A, 7) == Confirm(1, "h", 7, False, "unknown")
    source.offer()
    assert source.events == []


def test_table_of_waiters_is_limited() -> None:
    source = Source(max_handovers=2)
    for index in range(4):
        source.want(A, f"h{index}")
    assert source.turned_away() == [(A, "refused"), (A, "refused")]
    assert source.ledger.num_waiting == 2


def test_memory_of_ended_handovers_is_limited(source: Source) -> None:
    for index in range(MAX_ENDED + 10):
        source.ledger.withdraw(f"h{index}", 0.0)
    source.ledger.check_invariants()


def test_reused_id_is_a_new_handover(source: Source) -> None:
    source.offer()
    source.want(A)
    source.release(A, 1)
    source.offer()
    source.want(B)
    assert source.granted() == [(A, 1), (B, 2)]
    assert not source.release(A, 1).confirmed
    assert source.events == [Released("h", "released")]
