"""Which hand-over is pinned for whom and until when. No sockets, no clock: every call brings `now_s`.

The life of a hand-over on the prompt side:

1. *Unknown.* A `Want` that comes first makes the reader a waiter, for lease_s, renewed like a lease. A
   `Release` that comes first marks the id abandoned, so that its offer ends at once.
2. *Pinned*: `offer` was called. The lease runs from there, so blocks that nobody asks for are freed as well.
3. *Granted*: a reader wants it (or waited for it). It gets a generation, never used twice by this source,
   and a lease. A later `Want` of another reader takes over under a new generation.
4. *Withdrawn*: the engine took a granted hand-over back. The reader is told; its lease can no longer be
   renewed; nothing it releases is confirmed.
5. *Ended*, with one `Released` event: released, abandoned, expired or withdrawn. The outcome is kept for a
   while to answer late messages.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kv_transfer.errors import LayoutError
from kv_transfer.events import EndReason, Released, SourceEvent
from kv_transfer.layout import BlockIds, Identity, Region, as_block_ids, check_block_ids, num_blocks_for
from kv_transfer.messages import (
    ChoiceStart,
    Confirm,
    Grant,
    LeaseRef,
    LeaseTtl,
    Release,
    Renew,
    Renewed,
    ToSink,
    Unavailable,
    Want,
)
from kv_transfer.settings import TransferSettings
from kv_transfer.stats import SourceCounters

ReaderId: TypeAlias = bytes
Send: TypeAlias = Callable[[ReaderId, ToSink], None]

MAX_ENDED = 8192

_ConfirmReason = Literal["released", "abandoned", "expired", "withdrawn", "superseded", "unknown"]


@dataclass(frozen=True, slots=True)
class Offer:
    """A computed prompt whose blocks stay pinned until the `Released` event with its id.

    `block_ids` are the engine's blocks in sequence order, `ceil(num_tokens / block_size)` of them, none of
    them the null block 0. `first_tokens` are those of the choices that go on from this prompt, at least one.
    """

    handover_id: str
    num_tokens: int
    block_ids: Sequence[int] | BlockIds
    state_slot: int | None
    first_tokens: tuple[ChoiceStart, ...]


@dataclass(slots=True)
class _Pinned:
    offer: Offer
    block_ids: bytes
    expires_s: float
    generation: int = 0
    reader: ReaderId | None = None
    withdrawn: bool = False


@dataclass(slots=True)
class _Waiter:
    reader: ReaderId
    expires_s: float


@dataclass(frozen=True, slots=True)
class _Ended:
    reason: EndReason
    generation: int
    offered: bool


def check_offer(offer: Offer, block_size: int, regions: Sequence[Region]) -> BlockIds:
    """The offer's block ids as an array; `LayoutError` if they do not fit the tokens or the pool."""
    assert offer.first_tokens, "a prompt without a choice that goes on is withdrawn, not offered"
    ids = as_block_ids(offer.block_ids)
    expected = num_blocks_for(offer.num_tokens, block_size)
    if offer.num_tokens < 1 or ids.size != expected:
        raise LayoutError(
            f"hand-over {offer.handover_id} offers {ids.size} blocks for {offer.num_tokens} tokens; "
            f"blocks of {block_size} tokens make that {expected}"
        )
    kv = next(region for region in regions if region.kind == "kv")
    check_block_ids(ids, kv.num_blocks, first=1, what="block_ids")
    if offer.state_slot is not None:
        state = next((region for region in regions if region.kind == "state"), None)
        if state is None or not 0 <= offer.state_slot < state.num_blocks:
            raise LayoutError(f"state_slot {offer.state_slot} is not a row of a registered state region")
    return ids


class SourceLedger:
    def __init__(
        self,
        identity: Identity,
        settings: TransferSettings,
        counters: SourceCounters,
        send: Send,
        emit: Callable[[SourceEvent], None],
    ) -> None:
        self._epoch = identity.epoch
        self._settings = settings
        self._counters = counters
        self._send = send
        self._emit = emit
        self._pinned: dict[str, _Pinned] = {}
        self._waiters: dict[str, _Waiter] = {}
        self._ended: OrderedDict[str, _Ended] = OrderedDict()
        self._last_generation = 0

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    # From the engine

    def offer(self, offer: Offer, block_ids: BlockIds, now_s: float) -> None:
        handover_id = offer.handover_id
        assert handover_id not in self._pinned, f"hand-over {handover_id} is offered twice"
        self._counters.offers += 1
        ended = self._ended.pop(handover_id, None)
        pinned = _Pinned(offer, block_ids.astype("<i4").tobytes(), now_s + self._settings.lease_s)
        self._pinned[handover_id] = pinned
        if ended is not None and not ended.offered:
            self._end(handover_id, ended.reason)
            return
        waiter = self._waiters.pop(handover_id, None)
        if waiter is not None:
            self._grant(waiter.reader, pinned, now_s)

    def withdraw(self, handover_id: str, now_s: float) -> None:
        """Free it as soon as no reader holds it; an id that was never offered only turns its waiter away."""
        waiter = self._waiters.pop(handover_id, None)
        if waiter is not None:
            self._turn_away(waiter.reader, handover_id, 0, "withdrawn")
        pinned = self._pinned.get(handover_id)
        if pinned is None:
            if handover_id not in self._ended:
                self._remember(handover_id, _Ended("withdrawn", 0, offered=False))
        elif pinned.reader is None:
            self._end(handover_id, "withdrawn")
        elif not pinned.withdrawn:
            pinned.withdrawn = True
            self._turn_away(pinned.reader, handover_id, pinned.generation, "withdrawn")

    # From readers

    def want(self, reader: ReaderId, message: Want, now_s: float) -> None:
        handover_id = message.handover_id
        pinned = self._live(handover_id, now_s)
        if pinned is None:
            self._wait(reader, handover_id, now_s)
        elif pinned.withdrawn:
            self._turn_away(reader, handover_id, 0, "withdrawn")
        elif pinned.reader == reader:
            self._counters.ignored["duplicate"] += 1
        else:
            if pinned.reader is not None:
                self._turn_away(pinned.reader, handover_id, pinned.generation, "superseded")
            self._grant(reader, pinned, now_s)

    def renew(self, reader: ReaderId, message: Renew, now_s: float) -> None:
        ttls = [
            LeaseTtl(lease.handover_id, lease.generation, ttl_s)
            for lease in message.leases
            if (ttl_s := self._renew_one(reader, lease, now_s)) is not None
        ]
        self._send(reader, Renewed(self._epoch, message.sequence, ttls))

    def release(self, reader: ReaderId, message: Release, now_s: float) -> None:
        """Always answered, so that no reader waits; confirmed only for a lease that was valid until now."""
        handover_id = message.handover_id
        pinned = self._live(handover_id, now_s)
        if pinned is None:
            confirmed, reason = self._release_unpinned(reader, message, now_s)
        elif pinned.reader == reader and message.generation in (0, pinned.generation):
            confirmed, reason = self._release_held(message, pinned)
        else:
            self._counters.late_releases += 1
            confirmed, reason = False, "superseded"
        self._send(reader, Confirm(self._epoch, handover_id, message.generation, confirmed, reason))

    # From the clock

    def expire(self, now_s: float) -> None:
        """Every lease is looked at: a live one says nothing about the others."""
        for handover_id in [id_ for id_, waiter in self._waiters.items() if waiter.expires_s <= now_s]:
            del self._waiters[handover_id]
        for handover_id in [id_ for id_, pinned in self._pinned.items() if pinned.expires_s <= now_s]:
            self._expire_one(handover_id)

    def check_invariants(self) -> None:
        assert not self._pinned.keys() & self._waiters.keys(), "a pinned hand-over has a waiter"
        assert not self._pinned.keys() & self._ended.keys(), "a pinned hand-over is marked ended"
        assert len(self._ended) <= MAX_ENDED
        for pinned in self._pinned.values():
            assert (pinned.reader is None) == (pinned.generation == 0)
            assert pinned.generation <= self._last_generation
            assert pinned.reader is not None or not pinned.withdrawn

    # Steps

    def _live(self, handover_id: str, now_s: float) -> _Pinned | None:
        pinned = self._pinned.get(handover_id)
        if pinned is not None and pinned.expires_s <= now_s:
            self._expire_one(handover_id)
            return None
        return pinned

    def _grant(self, reader: ReaderId, pinned: _Pinned, now_s: float) -> None:
        self._last_generation += 1
        pinned.generation, pinned.reader = self._last_generation, reader
        pinned.expires_s = now_s + self._settings.lease_s
        self._counters.leases_granted += 1
        offer = pinned.offer
        self._send(
            reader,
            Grant(
                epoch=self._epoch,
                handover_id=offer.handover_id,
                generation=pinned.generation,
                ttl_s=self._settings.lease_s,
                num_tokens=offer.num_tokens,
                block_ids=pinned.block_ids,
                state_slot=offer.state_slot,
                first_tokens=offer.first_tokens,
            ),
        )

    def _wait(self, reader: ReaderId, handover_id: str, now_s: float) -> None:
        ended = self._ended.get(handover_id)
        if ended is not None and (ended.offered or ended.reason != "abandoned"):
            self._turn_away(reader, handover_id, 0, ended.reason)
            return
        waiter = self._waiters.get(handover_id)
        if waiter is None and len(self._waiters) >= self._settings.max_handovers:
            self._counters.ignored["full"] += 1
            self._turn_away(reader, handover_id, 0, "refused")
            return
        if waiter is not None and waiter.reader != reader:
            self._turn_away(waiter.reader, handover_id, 0, "superseded")
        if ended is not None:
            del self._ended[handover_id]
        self._waiters[handover_id] = _Waiter(reader, now_s + self._settings.lease_s)

    def _renew_one(self, reader: ReaderId, lease: LeaseRef, now_s: float) -> float | None:
        """Remaining seconds, or None if the reader does not hold this lease (any more)."""
        lease_s = self._settings.lease_s
        if lease.generation == 0:
            return self._renew_waiter(reader, lease.handover_id, now_s)
        pinned = self._live(lease.handover_id, now_s)
        if pinned is None or (pinned.reader, pinned.generation) != (reader, lease.generation):
            return None
        if pinned.withdrawn:
            return None
        pinned.expires_s = now_s + lease_s
        self._counters.leases_renewed += 1
        return lease_s

    def _renew_waiter(self, reader: ReaderId, handover_id: str, now_s: float) -> float | None:
        pinned = self._live(handover_id, now_s)
        if pinned is not None and pinned.reader == reader:
            return max(0.0, pinned.expires_s - now_s)  # its Grant crossed this message
        waiter = self._waiters.get(handover_id)
        if pinned is not None or (waiter is not None and waiter.reader != reader):
            return None
        self._wait(reader, handover_id, now_s)
        return self._settings.lease_s if handover_id in self._waiters else None

    def _release_held(self, message: Release, pinned: _Pinned) -> tuple[bool, _ConfirmReason]:
        if pinned.withdrawn:
            self._end(message.handover_id, "withdrawn")
            return False, "withdrawn"
        if message.outcome == "aborted":
            self._end(message.handover_id, "abandoned")
            return False, "abandoned"
        if message.generation == 0:
            self._counters.ignored["invalid"] += 1
            return False, "unknown"
        self._end(message.handover_id, "released")
        return True, "released"

    def _release_unpinned(
        self, reader: ReaderId, message: Release, now_s: float
    ) -> tuple[bool, _ConfirmReason]:
        handover_id = message.handover_id
        ended = self._ended.get(handover_id)
        if ended is not None:
            same = ended.generation == message.generation and ended.reason == "released"
            confirmed = same and message.outcome == "done"
            if confirmed:
                self._counters.ignored["duplicate"] += 1
            else:
                self._counters.late_releases += 1
            return confirmed, ended.reason
        waiter = self._waiters.get(handover_id)
        if waiter is not None and waiter.reader != reader:
            self._counters.late_releases += 1
            return False, "superseded"
        if message.generation != 0 or message.outcome != "aborted":
            self._counters.ignored["unknown"] += 1
            return False, "unknown"
        self._waiters.pop(handover_id, None)
        self._remember(handover_id, _Ended("abandoned", 0, offered=False))
        return False, "abandoned"

    def _expire_one(self, handover_id: str) -> None:
        pinned = self._pinned[handover_id]
        self._counters.leases_expired += 1
        if pinned.reader is not None and not pinned.withdrawn:
            self._turn_away(pinned.reader, handover_id, pinned.generation, "expired")
        self._end(handover_id, "withdrawn" if pinned.withdrawn else "expired")

    def _end(self, handover_id: str, reason: EndReason) -> None:
        pinned = self._pinned.pop(handover_id)
        self._waiters.pop(handover_id, None)
        self._remember(handover_id, _Ended(reason, pinned.generation, offered=True))
        self._counters.ends[reason] += 1
        self._emit(Released(handover_id, reason))

    def _remember(self, handover_id: str, ended: _Ended) -> None:
        self._ended[handover_id] = ended
        self._ended.move_to_end(handover_id)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _turn_away(
        self,
        reader: ReaderId,
        handover_id: str,
        generation: int,
        reason: EndReason | Literal["superseded", "refused"],
    ) -> None:
        self._send(reader, Unavailable(self._epoch, handover_id, generation, reason))
