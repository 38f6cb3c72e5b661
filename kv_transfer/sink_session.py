"""One sink's conversation with one prompt engine process. No sockets, no clock: every call brings `now_s`.

1. *Hello*: `sink_hello` says what is sent and what the answers mean.
2. *First contact*: the path is measured by reading the source's scratch memory.
3. *Ready*: messages go to the ledger, leases are renewed, reads are polled.
4. *Lost*: the peer is gone, is not the right one, or must be fenced. Its reads are stopped, its hand-overs
   have ended, and this object is never used again.
"""

from collections.abc import Callable, Sequence

from kv_transfer.errors import MessageError
from kv_transfer.events import FailReason, SinkEvent
from kv_transfer.layout import BlockIds, Identity, Region
from kv_transfer.messages import (
    Announce,
    Confirm,
    Grant,
    HelloOk,
    Introduction,
    Prefix,
    Refused,
    Renew,
    Renewed,
    ToSink,
    ToSource,
    Unavailable,
    decode_to_sink,
)
from kv_transfer.self_test import SinkScratch
from kv_transfer.settings import TransferSettings
from kv_transfer.sink_contact import FirstContact, PathReport
from kv_transfer.sink_hello import Opened, SinkHello, Unusable
from kv_transfer.sink_ledger import SinkLedger
from kv_transfer.sink_reads import Reads
from kv_transfer.sink_renewals import Renewals
from kv_transfer.stats import SinkCounters
from kv_transfer.transport import Connection, Transport
from wire.services import PromptEngineAddress


class PeerSession:
    """Sends through `send`, reports through `emit`."""

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
        scratch: SinkScratch | None = None,
    ) -> None:
        """Without `scratch` the path is not tested."""
        self.address = address
        self._scratch = scratch
        self._contact: FirstContact | None = None
        """While the path is tested."""
        self.path: PathReport | None = None
        self._settings = settings
        self._counters = counters
        self._send = send
        self._hello = SinkHello(address, identity, regions, transport)
        self._hello_until_s = now_s + settings.connect_timeout_s
        self._ledger = SinkLedger(
            address.epoch, identity.block_size, regions, settings, counters, send, emit, self.lose
        )
        self._reads: Reads | None = None
        """None until the hello is over, and once the session is lost."""
        self._renewals: Renewals | None = None
        self.lost: tuple[FailReason, str] | None = None
        """Why this session is over."""
        self.has_read = False
        """A read has arrived over this session."""

    @property
    def is_lost(self) -> bool:
        return self.lost is not None

    @property
    def is_ready(self) -> bool:
        return self._reads is not None

    @property
    def connection(self) -> Connection | None:
        if self._contact is not None:
            return self._contact.opened.connection
        return None if self._reads is None else self._reads.connection

    @property
    def num_handovers(self) -> int:
        return len(self._ledger)

    @property
    def num_reads(self) -> int:
        if self._contact is not None:
            return 1
        return 0 if self._reads is None else len(self._reads)

    @property
    def num_quarantined_blocks(self) -> int:
        return self._ledger.num_quarantined_blocks

    def __contains__(self, handover_id: object) -> bool:
        return handover_id in self._ledger

    # From the engine

    def start(self) -> None:
        self._send(self._hello.hello())

    def request(
        self, handover_id: str, deadline_s: float, now_s: float, prefix: Prefix | None = None
    ) -> None:
        """`deadline_s` is the time by which the whole prompt must be computed."""
        self._ledger.request(handover_id, deadline_s, now_s, prefix)

    def pull(
        self,
        handover_id: str,
        local_ids: BlockIds,
        local_slot: int | None,
        first_block: int,
        now_s: float,
    ) -> None:
        self._ledger.pull(handover_id, local_ids, local_slot, first_block, now_s)

    def abandon(self, handover_id: str, now_s: float) -> None:
        """Ends with `Reclaimable`; ignored if the hand-over has ended already."""
        self._ledger.abandon(handover_id, now_s)

    def decline(self, handover_id: str, now_s: float) -> None:
        """As `abandon`, but the source keeps it under a lease for another reader."""
        self._ledger.decline(handover_id, now_s)

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
            self._give_up(self._hello.refused(message), now_s)
        elif message.epoch != self.address.epoch:
            self._on_other_epoch(message, now_s)
        elif isinstance(message, HelloOk | Introduction):
            self._on_hello(message, now_s)
        elif not self.is_ready:
            self._counters.ignored["hello"] += 1
        elif isinstance(message, Grant):
            self._ledger.on_grant(message, now_s)
        elif isinstance(message, Announce):
            self._ledger.on_announce(message, now_s)
        elif isinstance(message, Unavailable):
            self._ledger.on_unavailable(message, now_s)
        elif isinstance(message, Renewed):
            self._on_renewed(message, now_s)
        elif isinstance(message, Confirm):
            self._ledger.on_confirm(message, now_s)

    # From the transport, the link and the clock

    def poll(self, now_s: float) -> bool:
        """True if reads ended."""
        if self._contact is not None:
            return self._poll_contact(self._contact, now_s)
        results = [] if self._reads is None else self._reads.poll()
        for result in results:
            if self.is_lost:
                break
            if result.peer_lost:
                self.lose("peer_lost", result.error or "the peer is gone", now_s)
            else:
                self.has_read |= result.error is None
                self._ledger.on_result(result, now_s)
        return self._ledger.verify(now_s) or bool(results)

    def tick(self, now_s: float) -> None:
        """Every deadline is looked at; call a few times a second."""
        overdue = None if self._contact is None else self._contact.overdue(now_s)
        if overdue is not None:
            self._give_up(overdue, now_s)
        if self._contact is None and not self.is_ready and now_s >= self._hello_until_s:
            self.lose("connect_failed", f"no hello within {self._settings.connect_timeout_s} s", now_s)
        self._ledger.check_deadlines(now_s)
        if self.is_ready and not self.is_lost:
            self._renew(now_s)

    def lose(self, reason: FailReason, message: str, now_s: float) -> None:
        """The peer is given up: fence its reads, then end every hand-over with it."""
        if self.is_lost:
            return
        self.lost = reason, message
        if self._reads is not None:
            self._reads.close()
            self._reads = None
        if self._contact is not None:
            self._contact.opened.connection.close()
            self._contact.close()
            self._contact = None
        self._ledger.lose_all(
            reason, f"prompt engine {self.address.engine_id} at {self.address.control_address}: {message}"
        )

    def close(self, now_s: float) -> None:
        """Let go of everything, telling the source."""
        self._ledger.release_all()
        self.lose("closed", "this engine is closing", now_s)

    def check_invariants(self) -> None:
        self._ledger.check_invariants()
        assert not (self.is_lost and (len(self._ledger) or self._reads))

    # Hello

    def _on_hello(self, message: HelloOk | Introduction, now_s: float) -> None:
        if self.is_ready or self._contact is not None:
            self._counters.ignored["duplicate"] += 1
        elif isinstance(message, HelloOk):
            self._send(self._hello.introduce())
        else:
            self._open(message, now_s)

    def _on_other_epoch(self, message: ToSink, now_s: float) -> None:
        if isinstance(message, HelloOk | Introduction):
            self._give_up(self._hello.other_epoch(message.epoch), now_s)
        else:
            self._counters.ignored["stale"] += 1

    def _open(self, message: Introduction, now_s: float) -> None:
        opened = self._hello.open(message)
        if isinstance(opened, Unusable):
            self._give_up(opened, now_s)
        elif self._scratch is None:
            self._use(opened, now_s)
        else:
            self._contact = FirstContact(self.address, opened, self._scratch, self._settings, now_s)

    def _poll_contact(self, contact: FirstContact, now_s: float) -> bool:
        found = contact.poll()
        if isinstance(found, Unusable):
            self._give_up(found, now_s)
        elif found is not None:
            self.path = found
            contact.close()
            self._contact = None
            self._use(contact.opened, now_s)
        return found is not None

    def _use(self, opened: Opened, now_s: float) -> None:
        self._reads = Reads(opened.connection)
        self._renewals = Renewals(opened.lease_s, now_s)
        self._ledger.open(self._reads, opened.regions, opened.plan)

    def _give_up(self, why: Unusable, now_s: float) -> None:
        self.lose(why.reason, why.message, now_s)

    # Leases

    def _renew(self, now_s: float) -> None:
        assert self._renewals is not None
        if self._renewals.is_overdue(now_s):
            self.lose("peer_lost", f"no answer for {self._renewals.reply_timeout_s:g} s", now_s)
        elif self._renewals.is_due(now_s):
            for sequence, part in self._renewals.send(self._ledger.leases(), now_s):
                self._send(Renew(self.address.epoch, sequence, part))

    def _on_renewed(self, message: Renewed, now_s: float) -> None:
        assert self._renewals is not None
        answer = self._renewals.answered(message)
        if answer is None:
            self._counters.ignored["unknown"] += 1
            return
        for lease, until_s in answer:
            self._ledger.on_lease(lease, until_s, now_s)
