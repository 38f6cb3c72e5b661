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
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from kv_transfer.errors import LayoutError, MessageError, PeerLost, ReadError
from kv_transfer.events import Arrived, Failed, FailReason, Offered, Reclaimable, SinkEvent
from kv_transfer.layout import BlockIds, Identity, Region, check_block_ids, num_blocks_for
from kv_transfer.messages import (
    MAX_RENEWALS,
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
from kv_transfer.stats import SinkCounters
from kv_transfer.transport import BlockRead, Connection, ReadResult, RemoteMemory, Transport
from wire.services import PromptEngineAddress

logger = logging.getLogger(__name__)

MIN_RENEW_INTERVAL_S = 0.05

MAX_FAREWELLS = 4096


class Stage(Enum):
    REQUESTED = "requested"
    WAITING = "waiting"
    OFFERED = "offered"
    READING = "reading"
    CONFIRMING = "confirming"
    QUARANTINED = "quarantined"


_LEASED = (Stage.OFFERED, Stage.READING)


@dataclass(slots=True)
class _Handover:
    handover_id: str
    deadline_s: float
    """Of the present stage."""
    stage_since_s: float
    stage: Stage = Stage.REQUESTED
    generation: int = 0
    lease_until_s: float = 0.0
    remote_ids: BlockIds = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    remote_slot: int | None = None
    read_id: int | None = None
    num_bytes: int = 0
    num_local_blocks: int = 0


@dataclass(frozen=True, slots=True)
class _SentRenewal:
    sent_s: float
    leases: tuple[LeaseRef, ...]


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
        self._handovers: dict[str, _Handover] = {}
        self._by_read: dict[int, _Handover] = {}
        self._farewells: OrderedDict[str, None] = OrderedDict()
        """Given up before the hello was over; the source is told so that it need not wait for the lease."""
        self._renewals: OrderedDict[int, _SentRenewal] = OrderedDict()
        self._last_sequence = 0
        self._renew_at_s = now_s
        self._renew_interval_s = settings.renew_interval_s
        self._reply_timeout_s = settings.lease_s
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
        handover = _Handover(handover_id, deadline_s, now_s)
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
            reads = self._plan(handover, local_ids, local_slot, skip_blocks)
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
            return
        wrong = message.field in ("engine_id", "epoch")
        self.lose(
            "wrong_engine" if wrong else "incompatible",
            f"{message.field} is {message.ours} there and {message.theirs} here",
            now_s,
        )

    def _on_other_epoch(self, message: ToSink, now_s: float) -> None:
        if isinstance(message, HelloOk | Introduction):
            self.lose("wrong_engine", f"epoch is {message.epoch} there and {self.address.epoch} here", now_s)
        else:
            self._counters.ignored["stale"] += 1

    def _on_introduction(self, message: Introduction, now_s: float) -> None:
        if self.is_ready:
            self._counters.ignored["duplicate"] += 1
            return
        difference = self._first_difference(message)
        if difference is not None:
            field_name, theirs, ours = difference
            reason: FailReason = "wrong_engine" if field_name == "engine_id" else "incompatible"
            self.lose(reason, f"{field_name} is {theirs} there and {ours} here", now_s)
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
        self._reply_timeout_s = max(message.lease_s, MIN_RENEW_INTERVAL_S)
        self._renew_interval_s = max(message.lease_s / 6, MIN_RENEW_INTERVAL_S)
        self._renew_at_s = now_s + self._renew_interval_s
        for handover in self._handovers.values():
            self._want(handover)
        for handover_id in self._farewells:
            self._send(Release(self.address.epoch, handover_id, 0, "aborted"))
        self._farewells.clear()

    def _first_difference(self, message: Introduction) -> tuple[str, str, str] | None:
        theirs = [f"{info.kind} of {info.block_bytes} bytes" for info in message.regions]
        ours = [f"{region.kind} of {region.block_bytes} bytes" for region in self._regions]
        for name, their_value, our_value in (
            ("engine_id", message.engine_id, self.address.engine_id),
            ("transport", message.transport, self._transport.name),
            ("regions", ", ".join(theirs), ", ".join(ours)),
        ):
            if their_value != our_value:
                return name, their_value, our_value
        if any(info.num_blocks < 1 or info.block_bytes < 1 for info in message.regions):
            return "regions", "an empty region", ", ".join(ours)
        return None

    # Lease

    def _want(self, handover: _Handover) -> None:
        handover.stage = Stage.WAITING
        self._send(Want(self.address.epoch, handover.handover_id))

    def _on_grant(self, message: Grant, now_s: float) -> None:
        handover = self._handovers.get(message.handover_id)
        if handover is None or handover.stage is not Stage.WAITING:
            self._counters.ignored["unknown" if handover is None else "duplicate"] += 1
            return
        handover.generation = message.generation
        try:
            self._check_grant(message)
        except LayoutError as error:
            self._fail(handover, "bad_offer", str(error), now_s)
            return
        self._leave_stage(handover, "wait", now_s)
        handover.stage = Stage.OFFERED
        handover.lease_until_s = now_s + message.ttl_s
        handover.remote_ids = np.frombuffer(message.block_ids, dtype="<i4").astype(np.int32)
        handover.remote_slot = message.state_slot
        self._emit(
            Offered(
                message.handover_id,
                message.num_tokens,
                int(handover.remote_ids.size),
                message.first_token_id,
                has_state=message.state_slot is not None,
            )
        )

    def _check_grant(self, message: Grant) -> None:
        if message.generation < 1:
            raise LayoutError("a grant needs a generation")
        if len(message.block_ids) % 4:
            raise LayoutError("block_ids is not a list of int32")
        num_blocks = len(message.block_ids) // 4
        expected = num_blocks_for(message.num_tokens, self._identity.block_size)
        if message.num_tokens < 1 or num_blocks != expected:
            raise LayoutError(
                f"{num_blocks} blocks were offered for {message.num_tokens} tokens, not {expected}"
            )
        if num_blocks > self._settings.max_blocks:
            raise LayoutError(f"{num_blocks} blocks are over max_blocks ({self._settings.max_blocks})")
        remote = self._remote_regions[self._index_of("kv")]
        ids = np.frombuffer(message.block_ids, dtype="<i4").astype(np.int32)
        check_block_ids(ids, remote.num_blocks, first=1, what="the offered block_ids")
        if message.state_slot is not None:
            state = self._remote_regions[self._index_of("state")]
            if message.state_slot >= state.num_blocks:
                raise LayoutError(
                    f"the offered state_slot {message.state_slot} is not below {state.num_blocks}"
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
        if self._renewals:
            oldest = next(iter(self._renewals.values()))
            if now_s - oldest.sent_s >= self._reply_timeout_s:
                self.lose("peer_lost", f"no answer for {self._reply_timeout_s:g} s", now_s)
                return
        if now_s < self._renew_at_s:
            return
        self._renew_at_s = now_s + self._renew_interval_s
        leases = [
            LeaseRef(handover.handover_id, handover.generation)
            for handover in self._handovers.values()
            if handover.stage is Stage.WAITING or handover.stage in _LEASED
        ]
        for start in range(0, len(leases), MAX_RENEWALS):
            self._last_sequence += 1
            part = tuple(leases[start : start + MAX_RENEWALS])
            self._renewals[self._last_sequence] = _SentRenewal(now_s, part)
            self._send(Renew(self.address.epoch, self._last_sequence, list(part)))

    def _on_renewed(self, message: Renewed, now_s: float) -> None:
        sent = self._renewals.pop(message.sequence, None)
        if sent is None:
            self._counters.ignored["unknown"] += 1
            return
        ttls = {(lease.handover_id, lease.generation): lease.ttl_s for lease in message.leases}
        for lease in sent.leases:
            handover = self._handovers.get(lease.handover_id)
            if handover is None or handover.generation != lease.generation:
                continue  # ended, or granted since
            if handover.stage is not Stage.WAITING and handover.stage not in _LEASED:
                continue
            ttl_s = ttls.get((lease.handover_id, lease.generation))
            if ttl_s is None:
                self._fail(handover, "expired", "the prompt engine no longer holds it", now_s)
            else:
                # Counted from before the question was sent: never later than the source's own clock.
                handover.lease_until_s = max(handover.lease_until_s, sent.sent_s + ttl_s)
                self._counters.renewals += 1

    # Read and confirm

    def _plan(
        self, handover: _Handover, local_ids: BlockIds, local_slot: int | None, skip_blocks: int
    ) -> list[BlockRead]:
        remote_ids = handover.remote_ids[skip_blocks:]
        if skip_blocks < 0 or remote_ids.size != local_ids.size:
            raise LayoutError(
                f"{local_ids.size} local blocks after {skip_blocks} skipped do not match the "
                f"{handover.remote_ids.size} offered"
            )
        if (local_slot is None) != (handover.remote_slot is None):
            raise LayoutError(f"local_state_slot is {local_slot}, the offered one {handover.remote_slot}")
        kv = self._index_of("kv")
        check_block_ids(local_ids, self._regions[kv].num_blocks, first=1, what="local_block_ids")
        reads = [BlockRead(kv, remote_ids, local_ids)] if local_ids.size else []
        if local_slot is not None and handover.remote_slot is not None:
            state = self._index_of("state")
            slots = np.array([local_slot], dtype=np.int32)
            check_block_ids(slots, self._regions[state].num_blocks, first=0, what="local_state_slot")
            reads.append(BlockRead(state, np.array([handover.remote_slot], dtype=np.int32), slots))
        return reads

    def _index_of(self, kind: str) -> int:
        for index, region in enumerate(self._regions):
            if region.kind == kind:
                return index
        raise LayoutError(f"no {kind} region is registered here")

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

    def _confirm(self, handover: _Handover, now_s: float) -> None:
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

    def _check_deadline(self, handover: _Handover, now_s: float) -> None:
        stage = handover.stage
        if stage in _LEASED and now_s >= handover.lease_until_s:
            self._fail(handover, "expired", "the lease was not renewed in time", now_s)
        elif stage is Stage.OFFERED or now_s < handover.deadline_s:
            return
        elif stage in (Stage.REQUESTED, Stage.WAITING):
            self._fail(handover, "offer_timeout", "the prompt was not computed before the deadline", now_s)
        elif stage is Stage.READING:
            self._fail(handover, "read_timeout", f"{handover.num_bytes} bytes did not arrive in time", now_s)
        elif stage is Stage.CONFIRMING:
            self._fail(handover, "confirm_timeout", "the prompt engine did not confirm in time", now_s)
        else:
            self._counters.fences += 1
            self.lose("peer_lost", "a read that was given up did not end; its connection is cut", now_s)

    def _fail(self, handover: _Handover, reason: FailReason, message: str, now_s: float) -> None:
        self._counters.failures[reason] += 1
        safe = self._let_go(handover, now_s)
        self._emit(Failed(handover.handover_id, reason, message, blocks_safe=safe))

    def _let_go(self, handover: _Handover, now_s: float) -> bool:
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

    def _release(self, handover: _Handover, outcome: str) -> None:
        self._send(
            Release(
                self.address.epoch,
                handover.handover_id,
                handover.generation,
                "done" if outcome == "done" else "aborted",
            )
        )

    def _leave_stage(self, handover: _Handover, name: str, now_s: float) -> None:
        self._counters.add_stage(name, now_s - handover.stage_since_s)
        handover.stage_since_s = now_s
