"""Where every hand-over with one prompt engine process stands on the completion side.

No sockets, no clock: every call brings `now_s`. The life of a hand-over:

1. *Requested*: the engine asked for it; the hello with its prompt engine is not over yet.
2. *Waiting*: `Want` is sent. Kept alive by `Renew` until there is something to read or the deadline passes.
3. *Offered*: `Grant` came, for the whole prompt or for its first blocks; `Announce` brings the others. The
   lease runs and is renewed while the engine looks for blocks.
4. *Reading*: the engine called `pull`; the destination belongs to the reads. What is announced is read at
   once, a chunk's blocks together.
   With verify_kv, what was read is compared with the source's digests before it goes on.
5. *Confirming*: all is computed and read, `Release(done)` is sent. Only the source's `Confirm` makes it
   `Arrived`.
6. *Quarantined*: given up while a read could not be cancelled. Ends when the transport reports that
   read over, or, after fence_after_s, by closing the connection to this peer.

Every hand-over ends with exactly one of `Arrived`, `Failed(blocks_safe=True)` and `Reclaimable`.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

from kv_transfer.errors import LayoutError, PeerLost, ReadError
from kv_transfer.events import Arrived, Failed, FailReason, Offered, Reclaimable, SinkEvent
from kv_transfer.kv_paths import KvPlan
from kv_transfer.layout import BlockIds, Region, num_blocks_for
from kv_transfer.messages import (
    Announce,
    Confirm,
    Ending,
    Grant,
    LeaseRef,
    Outcome,
    Prefix,
    Release,
    ToSource,
    Unavailable,
    Want,
)
from kv_transfer.settings import TransferSettings
from kv_transfer.sink_checks import announced_blocks, bytes_of, check_destination, plan_reads, unconfirmed
from kv_transfer.sink_farewells import Farewells
from kv_transfer.sink_handover import (
    LEASED,
    OVERDUE,
    RENEWED,
    Destination,
    Handover,
    Stage,
    leases_of,
    num_quarantined_blocks,
)
from kv_transfer.sink_reads import Reads
from kv_transfer.sink_verification import Verifications
from kv_transfer.stats import SinkCounters
from kv_transfer.transport import BlockRead, ReadResult
from kv_transfer.units import Units

logger = logging.getLogger(__name__)

Lose: TypeAlias = Callable[[FailReason, str, float], None]


class SinkLedger:
    """Sends through `send`, reports through `emit`; `lose` gives the whole peer up."""

    def __init__(
        self,
        epoch: int,
        block_size: int,
        regions: Sequence[Region],
        settings: TransferSettings,
        counters: SinkCounters,
        send: Callable[[ToSource], None],
        emit: Callable[[SinkEvent], None],
        lose: Lose,
    ) -> None:
        """`epoch`: the source's; `regions`: ours."""
        self._epoch = epoch
        self._block_size = block_size
        self._regions = tuple(regions)
        self._kv_block_bytes = sum(region.block_bytes for region in regions if region.kind == "kv")
        self._settings = settings
        self._counters = counters
        self._send = send
        self._emit = emit
        self._lose = lose
        self._reads: Reads | None = None
        """None until the hello is over."""
        self._remote_regions: tuple[Region, ...] = ()
        self._plan: KvPlan | None = None
        self._handovers: dict[str, Handover] = {}
        self._verifications = Verifications()
        self._farewells = Farewells()

    def __len__(self) -> int:
        return len(self._handovers)

    def __contains__(self, handover_id: object) -> bool:
        return handover_id in self._handovers

    @property
    def num_quarantined_blocks(self) -> int:
        return num_quarantined_blocks(self._handovers)

    @property
    def _units(self) -> Units:
        return self._ready_plan.units

    @property
    def _ready_plan(self) -> KvPlan:
        assert self._plan is not None, "nothing is granted before the hello is over"
        return self._plan

    # From the session

    def open(self, reads: Reads, remote_regions: tuple[Region, ...], plan: KvPlan) -> None:
        """The hello is over: ask for what was requested until now."""
        self._reads, self._remote_regions, self._plan = reads, remote_regions, plan
        for handover in self._handovers.values():
            self._want(handover)
        for handover_id, outcome in self._farewells.take():
            self._send(Release(self._epoch, handover_id, 0, outcome))

    def lose_all(self, reason: FailReason, text: str) -> None:
        """The peer is given up and its reads are fenced: end everything."""
        self._reads = None
        self._verifications.clear()
        handovers, self._handovers = self._handovers, {}
        if handovers:
            logger.warning("%d hand-overs lost (%s): %s", len(handovers), reason, text)
        for handover in handovers.values():
            if handover.stage is Stage.QUARANTINED:
                self._emit(Reclaimable(handover.handover_id))
            else:
                self._counters.failures[reason] += 1
                self._emit(Failed(handover.handover_id, reason, text, blocks_safe=True))

    def release_all(self) -> None:
        """Tell the source that nothing of this is wanted any more."""
        for handover in self._handovers.values():
            if self._reads is not None and handover.stage is not Stage.QUARANTINED:
                self._release(handover, "aborted")

    # From the engine

    def request(
        self, handover_id: str, deadline_s: float, now_s: float, prefix: Prefix | None = None
    ) -> None:
        """`deadline_s` is the time by which the whole prompt must be computed."""
        handover = Handover(handover_id, deadline_s, now_s, prefix)
        self._handovers[handover_id] = handover
        self._farewells.forget(handover_id)
        if self._reads is not None:
            self._want(handover)

    def pull(
        self,
        handover_id: str,
        local_ids: BlockIds,
        local_slot: int | None,
        first_block: int,
        now_s: float,
    ) -> None:
        handover = self._handovers.get(handover_id)
        if handover is None or handover.stage is not Stage.OFFERED:
            return  # it ended meanwhile, and its event says so
        destination = Destination(local_ids, local_slot, first_block)
        try:
            num_blocks = num_blocks_for(handover.num_tokens, self._block_size)
            check_destination(destination, num_blocks, self._regions)
        except LayoutError as error:
            self._fail(handover, "bad_pull", str(error), now_s)
            return
        handover.leave_stage("queue", now_s, self._counters)
        handover.destination = destination
        handover.num_posted_units = first_block * self._units.per_local
        handover.stage = Stage.READING
        self._read_on(handover, now_s)

    def abandon(self, handover_id: str, now_s: float) -> None:
        """Ends with `Reclaimable`; ignored if the hand-over has ended already."""
        self._give_up(handover_id, "aborted", now_s)

    def decline(self, handover_id: str, now_s: float) -> None:
        """As `abandon`, but the source keeps it under a lease for another reader."""
        self._give_up(handover_id, "declined", now_s)

    # From the peer, once the hello is over

    def on_grant(self, message: Grant, now_s: float) -> None:
        handover = self._handovers.get(message.handover_id)
        if handover is None or handover.stage is not Stage.WAITING:
            self._counters.ignored["unknown" if handover is None else "duplicate"] += 1
            return
        if message.generation == 0:
            self._counters.ignored["invalid"] += 1
            return
        handover.generation = message.generation
        handover.num_tokens = message.num_tokens
        if not self._learn(handover, message.block_ids, message.ending, now_s):
            return
        handover.leave_stage("wait", now_s, self._counters)
        handover.stage = Stage.OFFERED
        handover.lease_until_s = now_s + message.ttl_s
        num_blocks = num_blocks_for(message.num_tokens, self._block_size)
        self._emit(Offered(message.handover_id, message.num_tokens, num_blocks))

    def on_announce(self, message: Announce, now_s: float) -> None:
        handover = self._handovers.get(message.handover_id)
        if handover is None or handover.stage not in LEASED:
            self._counters.ignored["unknown"] += 1
        elif message.generation != handover.generation:
            self._counters.ignored["stale"] += 1
        elif handover.ending is not None or message.first_block != handover.remote_ids.size:
            told = f"blocks from {message.first_block} on, after {handover.remote_ids.size}"
            self._fail(handover, "bad_offer", f"the prompt engine announces {told}", now_s)
        elif self._learn(handover, message.block_ids, message.ending, now_s):
            self._read_on(handover, now_s)

    def on_unavailable(self, message: Unavailable, now_s: float) -> None:
        handover = self._handovers.get(message.handover_id)
        if handover is None or handover.stage is Stage.QUARANTINED:
            self._counters.ignored["unknown"] += 1
        elif message.generation != handover.generation:
            self._counters.ignored["stale"] += 1
        else:
            reason: FailReason = "superseded" if message.reason == "released" else message.reason
            self._fail(handover, reason, f"the prompt engine's copy is {message.reason}", now_s)

    def on_confirm(self, message: Confirm, now_s: float) -> None:
        handover = self._handovers.get(message.handover_id)
        if (
            handover is None
            or handover.stage is not Stage.CONFIRMING
            or handover.generation != message.generation
        ):
            if message.confirmed:
                self._counters.ignored["unknown"] += 1
            return  # the answer to an abort
        if not message.confirmed:
            self._fail(
                handover, unconfirmed(message), f"the prompt engine did not confirm: {message.reason}", now_s
            )
            return
        handover.leave_stage("confirm", now_s, self._counters)
        assert handover.destination is not None
        assert handover.ending is not None
        del self._handovers[handover.handover_id]
        self._counters.add_arrival(handover.destination.first_block, self._kv_block_bytes)
        self._emit(Arrived(handover.handover_id, handover.ending.first_tokens))

    # Leases

    def leases(self) -> list[LeaseRef]:
        """What is to be renewed."""
        return leases_of(self._handovers)

    def on_lease(self, lease: LeaseRef, until_s: float | None, now_s: float) -> None:
        """The source's answer for one lease: it holds until then, or is gone (None)."""
        handover = self._handovers.get(lease.handover_id)
        if handover is None or handover.generation != lease.generation:
            return  # ended, or granted since
        if handover.stage not in RENEWED:
            return
        if until_s is None:
            self._fail(handover, "expired", "the prompt engine no longer holds it", now_s)
        else:
            handover.lease_until_s = max(handover.lease_until_s, until_s)
            self._counters.renewals += 1

    # From the transport and the clock

    def on_result(self, result: ReadResult, now_s: float) -> None:
        """A read is over, and not because the peer is lost."""
        assert self._reads is not None
        handover = self._reads.finish(result)
        if handover is None:
            return
        if handover.stage is Stage.QUARANTINED:
            if not handover.read_ids:
                del self._handovers[handover.handover_id]
                self._emit(Reclaimable(handover.handover_id))
        elif result.error is None:
            self._confirm_if_whole(handover, now_s)
        else:
            self._fail(handover, "read_failed", result.error, now_s)

    def verify(self, now_s: float) -> bool:
        """Compare a slice of what was read with the source's digests; True if there is more to do."""
        done = self._verifications.advance()
        if done is not None:
            handover, difference = done
            if difference is None:
                self._confirm(handover, now_s)
            else:
                self._fail(handover, "corrupt", difference, now_s)
        return len(self._verifications) > 0

    def check_deadlines(self, now_s: float) -> None:
        """Every one is looked at; ends early if the peer is lost by it."""
        for handover in list(self._handovers.values()):
            reason = handover.overdue(now_s)
            if reason is not None:
                self._fail(handover, reason, OVERDUE[reason], now_s)
            elif handover.stage is Stage.QUARANTINED and now_s >= handover.deadline_s:
                self._counters.fences += 1
                self._lose("peer_lost", "a read that was given up did not end; its connection is cut", now_s)
                return

    def check_invariants(self) -> None:
        for handover in self._handovers.values():
            handover.check_invariants(is_connected=self._reads is not None)
        if self._reads is not None:
            self._reads.check_invariants()
        self._verifications.check_invariants(self._handovers)

    # Steps

    def _want(self, handover: Handover) -> None:
        handover.stage = Stage.WAITING
        self._send(Want(self._epoch, handover.handover_id, handover.prefix))

    def _learn(self, handover: Handover, block_ids: bytes, ending: Ending | None, now_s: float) -> bool:
        """Note what the source says is computed; False if it cannot be and the hand-over has failed."""
        num_blocks = num_blocks_for(handover.num_tokens, self._units.remote_block_size)
        try:
            handover.remote_ids = announced_blocks(
                handover.remote_ids,
                block_ids,
                ending,
                num_blocks=num_blocks,
                max_blocks=self._settings.max_blocks,
                remote_regions=self._remote_regions,
            )
        except LayoutError as error:
            self._fail(handover, "bad_offer", str(error), now_s)
            return False
        handover.ending, handover.ended_s = ending, now_s
        return True

    def _read_on(self, handover: Handover, now_s: float) -> None:
        """Read together what was announced since the last time and has a place to go."""
        if handover.destination is None:
            return
        units = self._units
        num_known = min(units.count(handover.num_tokens), handover.remote_ids.size * units.per_remote)
        new_units = range(handover.num_posted_units, num_known)
        try:
            reads = plan_reads(
                handover.remote_ids, handover.destination, new_units, handover.ending, self._ready_plan
            )
        except LayoutError as error:
            self._fail(handover, "bad_pull", str(error), now_s)
            return
        if not reads or self._start(handover, reads, now_s):
            handover.num_posted_units = max(handover.num_posted_units, num_known)
            self._confirm_if_whole(handover, now_s)

    def _start(self, handover: Handover, reads: Sequence[BlockRead], now_s: float) -> bool:
        """False if it failed."""
        assert self._reads is not None
        is_first = not handover.read_ids
        try:
            self._reads.start(handover, reads)
        except PeerLost as error:
            self._lose("peer_lost", str(error), now_s)
            return False
        except ReadError as error:
            self._fail(handover, "read_failed", str(error), now_s)
            return False
        num_bytes = bytes_of(reads, self._ready_plan)
        handover.count_read(num_bytes, now_s, self._settings, is_first=is_first)
        return True

    def _confirm_if_whole(self, handover: Handover, now_s: float) -> None:
        """Once the whole prompt is computed and read: ask whether it was valid until now."""
        if handover.ending is None or handover.read_ids:
            return
        if not self._settings.verify_kv:
            self._confirm(handover, now_s)
            return
        try:
            self._verifications.start(handover, self._regions, self._units)
        except LayoutError as error:
            self._fail(handover, "corrupt", str(error), now_s)

    def _confirm(self, handover: Handover, now_s: float) -> None:
        handover.leave_stage("read", now_s, self._counters)
        self._counters.add_stage("tail", now_s - handover.ended_s)
        self._counters.bytes_read += handover.num_bytes
        self._counters.blocks_read += handover.num_local_blocks
        handover.stage = Stage.CONFIRMING
        handover.deadline_s = now_s + self._settings.confirm_timeout_s
        self._release(handover, "done")

    def _give_up(self, handover_id: str, outcome: Outcome, now_s: float) -> None:
        handover = self._handovers.get(handover_id)
        if handover is None or handover.stage is Stage.QUARANTINED:
            return
        self._counters.abandoned += 1
        if self._let_go(handover, now_s, outcome):
            self._emit(Reclaimable(handover_id))

    def _fail(self, handover: Handover, reason: FailReason, message: str, now_s: float) -> None:
        self._counters.failures[reason] += 1
        safe = self._let_go(handover, now_s)
        self._emit(Failed(handover.handover_id, reason, message, blocks_safe=safe))

    def _let_go(self, handover: Handover, now_s: float, outcome: Outcome = "aborted") -> bool:
        """Tell the source; True if nothing can write to the destination any more, else quarantine."""
        self._verifications.stop(handover)
        if self._reads is None:
            self._farewells.add(handover.handover_id, outcome)
        elif handover.stage is not Stage.CONFIRMING:
            self._release(handover, outcome)
        if self._reads is not None and not self._reads.cancel(handover):
            self._counters.quarantined_blocks += handover.num_local_blocks
            handover.stage = Stage.QUARANTINED
            handover.deadline_s = now_s + self._settings.fence_after_s
            return False
        del self._handovers[handover.handover_id]
        return True

    def _release(self, handover: Handover, outcome: Outcome) -> None:
        self._send(Release(self._epoch, handover.handover_id, handover.generation, outcome))
