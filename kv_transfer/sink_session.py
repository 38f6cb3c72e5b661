"""One sink's conversation with one prompt engine process. No sockets, no clock: every call brings `now_s`.

The life of a hand-over on the completion side:

1. *Requested*: the engine asked for it; the hello with its prompt engine is not over yet.
2. *Waiting*: `Want` is sent. Kept alive by `Renew` until the prompt is computed or the deadline passes.
3. *Offered*: `Grant` came; the lease runs and is renewed while the engine looks for blocks.
4. *Reading*: the engine called `pull`; the destination belongs to the read.
5. *Confirming*: every read is over, `Release(done)` is sent. Only the source's `Confirm` makes it `Arrived`.
6. *Quarantined*: given up while a read could not be cancelled. Ends when the transport reports that
   read over, or, after fence_after_s, by closing the connection to this peer.

Every hand-over ends with exactly one of `Arrived`, `Failed(blocks_safe=True)` and `Reclaimable`.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kv_transfer.errors import LayoutError, MessageError, PeerLost, ReadError
from kv_transfer.events import Arrived, Failed, FailReason, Offered, Reclaimable, SinkEvent
from kv_transfer.layout import BlockIds, Identity, Region
from kv_transfer.messages import (
    PROTOCOL_VERSION,
    Confirm,
    Grant,
    Hello,
    HelloOk,
    Introduce,
    Introduction,
    LeaseRef,
    Refused,
    Release,
    Renew,
    Renewed,
    ToSink,
    ToSource,
    Unavailable,
    Want,
    decode_to_sink,
)
from kv_transfer.settings import TransferSettings
from kv_transfer.sink_checks import SourceBlocks, check_grant, difference_to, plan_reads
from kv_transfer.sink_handover import RENEWED, Handover, Stage
from kv_transfer.sink_renewals import Renewals
from kv_transfer.stats import SinkCounters
from kv_transfer.transport import Connection, ReadResult, RemoteMemory, Transport
from wire.services import PromptEngineAddress

logger = logging.getLogger(__name__)

MAX_FAREWELLS = 4096


_OVERDUE: dict[FailReason, str] = {
    "expired": "the lease was not renewed in time",
    "offer_timeout": "the prompt was not computed before the deadline",
    "read_timeout": "the blocks did not arrive in time",
    "confirm_timeout": "the prompt engine did not confirm in time",
}


class PeerSession:
    """Sends through `send`, reports through `emit`; a lost session is closed and never used again."""

    def __init__(
        self,
        address: PromptEngineAddress,
        identity: Identity,
        regions: Sequence[Region],
        transport: Transport,
        settings: TransferSettings,
        counters: SinkCounters,
        send: Callable[[ToSource], None],
        emit: Callable[[SinkEvent], None],
        now_s: float,
    ) -> None:
        self.address = address
        self._identity = identity
        self._regions = tuple(regions)
        self._transport = transport
        self._settings = settings
        self._counters = counters
        self._send = send
        self._emit = emit
        self._connection: Connection | None = None
        self._remote_regions: tuple[Region, ...] = ()
        self._handovers: dict[str, Handover] = {}
        self._by_read: dict[int, Handover] = {}
        self._farewells: OrderedDict[str, None] = OrderedDict()
        """Given up before the hello was over; the source is told so that it need not wait for the lease."""
        self._renewals: Renewals | None = None
        self._hello_until_s = now_s + settings.connect_timeout_s
        self.is_lost = False

    @property
    def is_ready(self) -> bool:
        return self._connection is not None

    @property
    def connection(self) -> Connection | None:
        return self._connection

    @property
    def num_handovers(self) -> int:
        return len(self._handovers)

    @property
    def num_reads(self) -> int:
        return len(self._by_read)

    @property
    def num_quarantined_blocks(self) -> int:
        return sum(
            handover.num_local_blocks
            for handover in list(self._handovers.values())
            if handover.stage is Stage.QUARANTINED
        )

    def __contains__(self, handover_id: object) -> bool:
        return handover_id in self._handovers

    # From the engine

    def start(self) -> None:
        self._send(Hello(self.address.epoch, PROTOCOL_VERSION, dict(self._identity.compatibility)))

    def request(self, handover_id: str, deadline_s: float, now_s: float) -> None:
        """`deadline_s` is the time by which the offer must be here."""
        handover = Handover(handover_id, deadline_s, now_s)
        self._handovers[handover_id] = handover
        if self.is_ready:
            self._want(handover)

    def pull(
        self,
        handover_id: str,
        local_ids: BlockIds,
        local_slot: int | None,
        skip_blocks: int,
        now_s: float,
    ) -> None:
        handover = self._handovers.get(handover_id)
        if handover is None or handover.stage is not Stage.OFFERED:
            return  # it ended meanwhile, and its event says so
        assert self._connection is not None
        try:
            source = SourceBlocks(handover.remote_ids, handover.remote_slot)
            reads = plan_reads(source, local_ids, local_slot, skip_blocks, self._regions)
        except LayoutError as error:
            self._fail(handover, "bad_pull", str(error), now_s)
            return
        self._leave_stage(handover, "queue", now_s)
        handover.num_local_blocks = int(local_ids.size)
        handover.num_bytes = sum(
            int(read.local_ids.size) * self._regions[read.region].block_bytes for read in reads
        )
        if not reads:
            self._confirm(handover, now_s)
            return
        try:
            handover.read_id = self._connection.read(reads)
        except PeerLost as error:
            self.lose("peer_lost", str(error), now_s)
            return
        except ReadError as error:
            self._fail(handover, "read_failed", str(error), now_s)
            return
        self._by_read[handover.read_id] = handover
        handover.stage = Stage.READING
        handover.deadline_s = now_s + self._settings.read_deadline_s(handover.num_bytes)

    def abandon(self, handover_id: str, now_s: float) -> None:
        """Ends with `Reclaimable`; ignored if the hand-over has ended already."""
        handover = self._handovers.get(handover_id)
        if handover is None or handover.stage is Stage.QUARANTINED:
            return
        self._counters.abandoned += 1
        if self._let_go(handover, now_s):
            self._emit(Reclaimable(handover_id))

    # From the peer

    def on_frames(self, frames: Sequence[bytes], now_s: float) -> None:
        try:
            if len(frames) != 1:
                raise MessageError(f"a message of {len(frames)} frames")
            message = decode_to_sink(frames[0])
        except MessageError:
            self._counters.ignored["invalid"] += 1
            return
        if not self.is_lost:
            self._dispatch(message, now_s)

    def _dispatch(self, message: ToSink, now_s: float) -> None:
        if isinstance(message, Refused):
            self._on_refused(message, now_s)
        elif message.epoch != self.address.epoch:
            self._on_other_epoch(message, now_s)
        elif isinstance(message, HelloOk):
            self._introduce()
        elif isinstance(message, Introduction):
            self._on_introduction(message, now_s)
        elif not self.is_ready:
            self._counters.ignored["hello"] += 1
        elif isinstance(message, Grant):
            self._on_grant(message, now_s)
        elif isinstance(message, Unavailable):
            self._on_unavailable(message, now_s)
        elif isinstance(message, Renewed):
            self._on_renewed(message, now_s)
        elif isinstance(message, Confirm):
            self._on_confirm(message, now_s)

    # From the transport, the link and the clock

    def poll(self, now_s: float) -> bool:
        """True if reads ended."""
        if self._connection is None or not self._by_read:
            return False
        results = self._connection.poll()
        for result in results:
            if not self.is_lost:
                self._on_result(result, now_s)
        return bool(results)

    def tick(self, now_s: float) -> None:
        """Every deadline is looked at; call a few times a second."""
        if not self.is_ready and now_s >= self._hello_until_s:
            self.lose("connect_failed", f"no hello within {self._settings.connect_timeout_s} s", now_s)
        for handover in list(self._handovers.values()):
            if not self.is_lost:
                self._check_deadline(handover, now_s)
        if self.is_ready and not self.is_lost:
            self._renew(now_s)

    def lose(self, reason: FailReason, message: str, now_s: float) -> None:
        """The peer is given up: fence its reads, then end every hand-over with it."""
        if self.is_lost:
            return
        self.is_lost = True
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._by_read.clear()
        handovers, self._handovers = self._handovers, {}
        text = f"prompt engine {self.address.engine_id} at {self.address.control_address}: {message}"
        if handovers:
            logger.warning("%d hand-overs lost (%s): %s", len(handovers), reason, text)
        for handover in handovers.values():
            if handover.stage is Stage.QUARANTINED:
                self._emit(Reclaimable(handover.handover_id))
            else:
                self._counters.failures[reason] += 1
                self._emit(Failed(handover.handover_id, reason, text, blocks_safe=True))

    def close(self, now_s: float) -> None:
        """Let go of everything, telling the source."""
        for handover in self._handovers.values():
            if self.is_ready and handover.stage is not Stage.QUARANTINED:
                self._release(handover, "aborted")
        self.lose("closed", "this engine is closing", now_s)

    def check_invariants(self) -> None:
        for handover in self._handovers.values():
            reading = handover.stage in (Stage.READING, Stage.QUARANTINED)
            assert reading == (handover.read_id is not None), handover
            assert reading == (self._by_read.get(handover.read_id or 0) is handover), handover
            assert (handover.stage is Stage.REQUESTED) == (not self.is_ready), handover
            assert (handover.generation == 0) == (handover.stage in (Stage.REQUESTED, Stage.WAITING)), (
                handover
            )
        assert len(self._by_read) <= len(self._handovers)
        assert not (self.is_lost and (self._handovers or self._connection))

    # Hello

    def _introduce(self) -> None:
        if self.is_ready:
            self._counters.ignored["duplicate"] += 1
            return
        self._send(
            Introduce(
                epoch=self.address.epoch,
                engine_id=self.address.engine_id,
                reader_engine_id=self._identity.engine_id,
                reader_epoch=self._identity.epoch,
                transport=self._transport.name,
                transport_version=self._transport.version,
            )
        )

    def _on_refused(self, message: Refused, now_s: float) -> None:
        if message.field == "session":
            self.lose("peer_lost", "it does not know this session any more", now_s)
        else:
            self._mismatch(message.field, message.ours, message.theirs, now_s)

    def _mismatch(self, field: str, theirs: str, ours: str, now_s: float) -> None:
        reason: FailReason = "wrong_engine" if field in ("engine_id", "epoch") else "incompatible"
        self.lose(reason, f"{field} is {theirs} there and {ours} here", now_s)

    def _on_other_epoch(self, message: ToSink, now_s: float) -> None:
        if isinstance(message, HelloOk | Introduction):
            self._mismatch("epoch", str(message.epoch), str(self.address.epoch), now_s)
        else:
            self._counters.ignored["stale"] += 1

    def _on_introduction(self, message: Introduction, now_s: float) -> None:
        if self.is_ready:
            self._counters.ignored["duplicate"] += 1
            return
        difference = difference_to(message, self.address.engine_id, self._transport.name, self._regions)
        if difference is not None:
            self._mismatch(*difference, now_s)
            return
        self._remote_regions = tuple(
            Region(info.kind, info.address, info.block_bytes, info.num_blocks) for info in message.regions
        )
        memory = RemoteMemory(message.blob, self._remote_regions, self.address.control_address)
        try:
            self._connection = self._transport.connect(memory)
        except ReadError as error:
            self.lose("connect_failed", str(error), now_s)
            return
        self._renewals = Renewals(message.lease_s, now_s)
        for handover in self._handovers.values():
            self._want(handover)
        for handover_id in self._farewells:
            self._send(Release(self.address.epoch, handover_id, 0, "aborted"))
        self._farewells.clear()

    # Lease

    def _want(self, handover: Handover) -> None:
        handover.stage = Stage.WAITING
        self._send(Want(self.address.epoch, handover.handover_id))

    def _on_grant(self, message: Grant, now_s: float) -> None:
        handover = self._handovers.get(message.handover_id)
        if handover is None or handover.stage is not Stage.WAITING:
            self._counters.ignored["unknown" if handover is None else "duplicate"] += 1
            return
        handover.generation = message.generation
        try:
            remote_ids = check_grant(
                message, self._identity.block_size, self._remote_regions, self._settings.max_blocks
            )
        except LayoutError as error:
            self._fail(handover, "bad_offer", str(error), now_s)
            return
        self._leave_stage(handover, "wait", now_s)
        handover.stage = Stage.OFFERED
        handover.lease_until_s = now_s + message.ttl_s
        handover.remote_ids = remote_ids
        handover.remote_slot = message.state_slot
        self._emit(
            Offered(
                message.handover_id,
                message.num_tokens,
                int(handover.remote_ids.size),
                message.first_tokens,
                has_state=message.state_slot is not None,
            )
        )

    def _on_unavailable(self, message: Unavailable, now_s: float) -> None:
        handover = self._handovers.get(message.handover_id)
        if handover is None or handover.stage is Stage.QUARANTINED:
            self._counters.ignored["unknown"] += 1
        elif message.generation != handover.generation:
            self._counters.ignored["stale"] += 1
        else:
            reason: FailReason = "superseded" if message.reason == "released" else message.reason
            self._fail(handover, reason, f"the prompt engine's copy is {message.reason}", now_s)

    def _renew(self, now_s: float) -> None:
        assert self._renewals is not None
        if self._renewals.is_overdue(now_s):
            self.lose("peer_lost", f"no answer for {self._renewals.reply_timeout_s:g} s", now_s)
        elif self._renewals.is_due(now_s):
            leases = [
                LeaseRef(handover.handover_id, handover.generation)
                for handover in self._handovers.values()
                if handover.stage in RENEWED
            ]
            for sequence, part in self._renewals.send(leases, now_s):
                self._send(Renew(self.address.epoch, sequence, part))

    def _on_renewed(self, message: Renewed, now_s: float) -> None:
        assert self._renewals is not None
        answer = self._renewals.answered(message)
        if answer is None:
            self._counters.ignored["unknown"] += 1
            return
        for lease, until_s in answer:
            handover = self._handovers.get(lease.handover_id)
            if handover is None or handover.generation != lease.generation:
                continue  # ended, or granted since
            if handover.stage not in RENEWED:
                continue
            if until_s is None:
                self._fail(handover, "expired", "the prompt engine no longer holds it", now_s)
            else:
                handover.lease_until_s = max(handover.lease_until_s, until_s)
                self._counters.renewals += 1

    # Read and confirm

    def _on_result(self, result: ReadResult, now_s: float) -> None:
        if result.peer_lost:
            self.lose("peer_lost", result.error or "the peer is gone", now_s)
            return
        handover = self._by_read.pop(result.read_id, None)
        if handover is None:
            return
        handover.read_id = None
        if handover.stage is Stage.QUARANTINED:
            del self._handovers[handover.handover_id]
            self._emit(Reclaimable(handover.handover_id))
        elif result.error is None:
            self._leave_stage(handover, "read", now_s)
            self._counters.bytes_read += handover.num_bytes
            self._counters.blocks_read += handover.num_local_blocks
            self._confirm(handover, now_s)
        else:
            self._fail(handover, "read_failed", result.error, now_s)

    def _confirm(self, handover: Handover, now_s: float) -> None:
        handover.stage = Stage.CONFIRMING
        handover.deadline_s = now_s + self._settings.confirm_timeout_s
        self._release(handover, "done")

    def _on_confirm(self, message: Confirm, now_s: float) -> None:
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
            reason: FailReason = (
                "expired" if message.reason == "unknown" or message.reason == "released" else message.reason
            )
            self._fail(handover, reason, f"the prompt engine did not confirm: {message.reason}", now_s)
            return
        self._leave_stage(handover, "confirm", now_s)
        del self._handovers[handover.handover_id]
        self._counters.arrived += 1
        self._emit(Arrived(handover.handover_id))

    # Ends

    def _check_deadline(self, handover: Handover, now_s: float) -> None:
        reason = handover.overdue(now_s)
        if reason is not None:
            self._fail(handover, reason, _OVERDUE[reason], now_s)
        elif handover.stage is Stage.QUARANTINED and now_s >= handover.deadline_s:
            self._counters.fences += 1
            self.lose("peer_lost", "a read that was given up did not end; its connection is cut", now_s)

    def _fail(self, handover: Handover, reason: FailReason, message: str, now_s: float) -> None:
        self._counters.failures[reason] += 1
        safe = self._let_go(handover, now_s)
        self._emit(Failed(handover.handover_id, reason, message, blocks_safe=safe))

    def _let_go(self, handover: Handover, now_s: float) -> bool:
        """Tell the source; True if nothing can write to the destination any more, else quarantine."""
        if not self.is_ready:
            self._farewells[handover.handover_id] = None
            if len(self._farewells) > MAX_FAREWELLS:
                self._farewells.popitem(last=False)
        elif handover.stage is not Stage.CONFIRMING:
            self._release(handover, "aborted")
        if handover.read_id is not None:
            assert self._connection is not None
            if not self._connection.cancel(handover.read_id):
                handover.stage = Stage.QUARANTINED
                handover.deadline_s = now_s + self._settings.fence_after_s
                return False
            del self._by_read[handover.read_id]
        del self._handovers[handover.handover_id]
        return True

    def _release(self, handover: Handover, outcome: str) -> None:
        self._send(
            Release(
                self.address.epoch,
                handover.handover_id,
                handover.generation,
                "done" if outcome == "done" else "aborted",
            )
        )

    def _leave_stage(self, handover: Handover, name: str, now_s: float) -> None:
        self._counters.add_stage(name, now_s - handover.stage_since_s)
        handover.stage_since_s = now_s
