"""Which hand-over is pinned for whom and until when. No sockets, no clock: every call brings `now_s`.

The life of a hand-over on the prompt side:

1. *Unknown.* A `Want` that comes first makes the reader a waiter, for lease_s, renewed like a lease. A
   `Release` that comes first marks the id abandoned, so that its offer ends at once.
2. *Growing*: `announce` was called, the prompt is being computed. Its blocks are the engine's own, so nothing
   but a reader's lease runs out, and a withdrawal ends it at once, without an event.
3. *Pinned*: `offer` was called. The lease runs from there, so blocks that nobody asks for are freed as well.
4. *Granted*, growing or pinned: a reader wants it (or waited for it). It gets a generation, never used twice
   by this source, and a lease. A later `Want` of another reader takes over under a new generation.
5. *Withdrawn*: the engine took a granted hand-over back. The reader is told; its lease can no longer be
   renewed; nothing it releases is confirmed.
6. *Ended*, with one `Released` event: released, abandoned, expired or withdrawn. The outcome is kept for a
   while to answer late messages.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np

from kv_transfer.events import EndReason, Released, SourceEvent
from kv_transfer.layout import BlockIds, Identity
from kv_transfer.messages import (
    Announce,
    Confirm,
    Ending,
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
from kv_transfer.offers import Announcement, Offer
from kv_transfer.settings import TransferSettings
from kv_transfer.source_handover import Ended, Pinned, ReaderId, Waiter
from kv_transfer.stats import SourceCounters

Send: TypeAlias = Callable[[ReaderId, ToSink], None]

MAX_ENDED = 8192

_ConfirmReason = Literal["released", "abandoned", "expired", "withdrawn", "superseded", "unknown"]


class SourceLedger:
    def __init__(
        self,
        identity: Identity,
        settings: TransferSettings,
        counters: SourceCounters,
        send: Send,
        emit: Callable[[SourceEvent], None],
        name_of: Callable[[ReaderId], str] = lambda reader: "",
    ) -> None:
        """`name_of`: the engine id of a reader."""
        self._epoch = identity.epoch
        self._settings = settings
        self._counters = counters
        self._send = send
        self._emit = emit
        self._name_of = name_of
        self._pinned: dict[str, Pinned] = {}
        self._waiters: dict[str, Waiter] = {}
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        self._last_generation = 0

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    # From the engine

    def announce(self, announcement: Announcement, block_ids: BlockIds, now_s: float) -> None:
        handover_id = announcement.handover_id
        self._counters.announcements += 1
        pinned = self._pinned.get(handover_id)
        if pinned is not None:
            self._extend(pinned, block_ids, None, announcement.attempt, now_s)
        elif self._has_no_taker(handover_id):
            return  # its offer will end at once, unless someone asks for it until then
        else:
            growing = Pinned(handover_id, announcement.num_tokens, block_ids, None, math.inf)
            growing.attempt = announcement.attempt
            self._pin(growing, now_s)

    def offer(self, offer: Offer, block_ids: BlockIds, now_s: float, digests: bytes = b"") -> None:
        handover_id = offer.handover_id
        ending = Ending(offer.state_slot, offer.first_tokens, digests)
        self._counters.offers += 1
        pinned = self._pinned.get(handover_id)
        if pinned is not None:
            self._extend(pinned, block_ids, ending, offer.attempt, now_s)
            return
        has_no_taker, ended = self._has_no_taker(handover_id), self._ended.get(handover_id)
        until_s = now_s + self._settings.lease_s
        self._pin(Pinned(handover_id, offer.num_tokens, block_ids, ending, until_s), now_s)
        if has_no_taker and ended is not None:
            self._end(handover_id, ended.reason)

    def withdraw(self, handover_id: str, now_s: float) -> None:
        """Free it as soon as no reader holds it; one that was never offered only turns its reader away."""
        waiter = self._waiters.pop(handover_id, None)
        if waiter is not None:
            self._turn_away(waiter.reader, handover_id, 0, "withdrawn")
        pinned = self._pinned.get(handover_id)
        if pinned is None:
            if handover_id not in self._ended:
                self._remember(handover_id, Ended("withdrawn", 0, offered=False))
        elif pinned.ending is None:
            if pinned.reader is not None:
                self._turn_away(pinned.reader, handover_id, pinned.generation, "withdrawn")
            self._drop_growing(pinned, "withdrawn")
        elif pinned.reader is None:
            self._end(handover_id, "withdrawn")
        elif not pinned.withdrawn:
            pinned.withdrawn = True
            self._turn_away(pinned.reader, handover_id, pinned.generation, "withdrawn")

    # From readers

    def want(self, reader: ReaderId, message: Want, now_s: float) -> bool:
        """True if the reader has begun to wait for this hand-over."""
        handover_id = message.handover_id
        was_waiting = handover_id in self._waiters
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
        return handover_id in self._waiters and not was_waiting

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
            confirmed, reason = self._release_held(message, pinned, now_s)
        else:
            self._counters.late_releases += 1
            self._counters.count_lease(self._name_of(reader), "late")
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
            assert pinned.ending is not None or not pinned.withdrawn
            assert math.isinf(pinned.expires_s) == (pinned.ending is None and pinned.reader is None)

    # Steps

    def _live(self, handover_id: str, now_s: float) -> Pinned | None:
        pinned = self._pinned.get(handover_id)
        if pinned is not None and pinned.expires_s <= now_s:
            self._expire_one(handover_id)
        return self._pinned.get(handover_id)

    def _has_no_taker(self, handover_id: str) -> bool:
        """It was given up, or taken back, before there was anything of it."""
        ended = self._ended.get(handover_id)
        return ended is not None and not ended.offered

    def _pin(self, pinned: Pinned, now_s: float) -> None:
        handover_id = pinned.handover_id
        self._ended.pop(handover_id, None)
        self._pinned[handover_id] = pinned
        waiter = self._waiters.pop(handover_id, None)
        if waiter is not None:
            self._grant(waiter.reader, pinned, now_s)

    def _extend(
        self, pinned: Pinned, block_ids: BlockIds, ending: Ending | None, attempt: int, now_s: float
    ) -> None:
        """More of a growing hand-over is computed, or all of it."""
        assert pinned.ending is None, f"hand-over {pinned.handover_id} is offered already"
        known, pinned.block_ids, pinned.ending = pinned.block_ids, block_ids, ending
        is_same, pinned.attempt = pinned.attempt == attempt, attempt
        if pinned.reader is None:
            pinned.let_go(now_s + self._settings.lease_s)
        elif not (is_same and np.array_equal(block_ids[: known.size], known)):
            # Computed once more, be it into the same blocks: others may have had them while they were read.
            self._turn_away(pinned.reader, pinned.handover_id, pinned.generation, "superseded")
            pinned.let_go(now_s + self._settings.lease_s)
        elif ending is not None or block_ids.size > known.size:  # a chunk may end inside a known block
            new = _as_bytes(block_ids[known.size :])
            self._send(
                pinned.reader,
                Announce(self._epoch, pinned.handover_id, pinned.generation, known.size, new, ending),
            )

    def _drop_growing(self, pinned: Pinned, reason: EndReason) -> None:
        del self._pinned[pinned.handover_id]
        self._remember(pinned.handover_id, Ended(reason, pinned.generation, offered=False))

    def _grant(self, reader: ReaderId, pinned: Pinned, now_s: float) -> None:
        self._last_generation += 1
        pinned.hold(reader, self._last_generation, now_s + self._settings.lease_s)
        self._counters.leases_granted += 1
        self._counters.count_lease(self._name_of(reader), "granted")
        self._send(
            reader,
            Grant(
                epoch=self._epoch,
                handover_id=pinned.handover_id,
                generation=pinned.generation,
                ttl_s=self._settings.lease_s,
                num_tokens=pinned.num_tokens,
                block_ids=_as_bytes(pinned.block_ids),
                ending=pinned.ending,
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
        self._waiters[handover_id] = Waiter(reader, now_s + self._settings.lease_s)

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
        self._counters.count_lease(self._name_of(reader), "renewed")
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

    def _release_held(self, message: Release, pinned: Pinned, now_s: float) -> tuple[bool, _ConfirmReason]:
        if pinned.withdrawn:
            self._end(message.handover_id, "withdrawn")
            return False, "withdrawn"
        if message.outcome == "declined":
            pinned.let_go(now_s + self._settings.lease_s)
            return False, "abandoned"
        if message.outcome == "aborted":
            if pinned.ending is None:
                self._drop_growing(pinned, "abandoned")
            else:
                self._end(message.handover_id, "abandoned")
            return False, "abandoned"
        if message.generation == 0 or pinned.ending is None:
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
            elif message.outcome == "done" or ended.offered:
                self._counters.late_releases += 1
                self._counters.count_lease(self._name_of(reader), "late")
            return confirmed, ended.reason
        waiter = self._waiters.get(handover_id)
        if waiter is not None and waiter.reader != reader:
            self._counters.late_releases += 1
            self._counters.count_lease(self._name_of(reader), "late")
            return False, "superseded"
        if message.generation != 0 or message.outcome == "done":
            self._counters.ignored["unknown"] += 1
            return False, "unknown"
        self._waiters.pop(handover_id, None)
        if message.outcome == "aborted":
            self._remember(handover_id, Ended("abandoned", 0, offered=False))
        return False, "abandoned"

    def _expire_one(self, handover_id: str) -> None:
        pinned = self._pinned[handover_id]
        self._counters.leases_expired += 1
        if pinned.reader is not None:
            self._counters.count_lease(self._name_of(pinned.reader), "expired")
        if pinned.reader is not None and not pinned.withdrawn:
            self._turn_away(pinned.reader, handover_id, pinned.generation, "expired")
        if pinned.ending is None:
            pinned.let_go(math.inf)
        else:
            self._end(handover_id, "withdrawn" if pinned.withdrawn else "expired")

    def _end(self, handover_id: str, reason: EndReason) -> None:
        pinned = self._pinned.pop(handover_id)
        self._waiters.pop(handover_id, None)
        self._remember(handover_id, Ended(reason, pinned.generation, offered=True))
        self._counters.ends[reason] += 1
        self._emit(Released(handover_id, reason))

    def _remember(self, handover_id: str, ended: Ended) -> None:
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


def _as_bytes(block_ids: BlockIds) -> bytes:
    return block_ids.astype("<i4").tobytes()
