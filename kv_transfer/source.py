"""The prompt engine's end of the hand-over.

The engine calls `announce` when a chunk is computed, `offer` when the whole prompt is, and keeps its blocks
from then on until `Released` comes out of `events`. Every other decision is `SourceLedger`'s; this module
joins it to a socket, a clock and a thread.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from kv_transfer.events import SourceEvent
from kv_transfer.gate import AddressGate
from kv_transfer.layout import BlockIds, Identity, Region
from kv_transfer.messages import ToSink, encode
from kv_transfer.offer_digests import OfferDigests
from kv_transfer.offers import Announcement, Offer, check_announcement, check_offer
from kv_transfer.pump import IDLE_S, Clock, Pump
from kv_transfer.self_test import SourceScratch
from kv_transfer.settings import TransferSettings
from kv_transfer.sockets import LOCAL_HOST, advertised, bind, control_router, local_host, receive_all
from kv_transfer.source_handover import ReaderId
from kv_transfer.source_protocol import Served, SourceProtocol
from kv_transfer.stats import SourceStats
from kv_transfer.transport import Transport
from wire.transfer import TransferPeer

logger = logging.getLogger(__name__)


class HandoverSource:
    """Offers computed prompts to readers. Thread-safe; owns one pump thread and the transport.

    `wake` is called from the pump thread whenever `events` has something new; it must not block. Raises
    `BindError`, `SettingsError` or `TransportUnavailable`; nothing is left open then.
    """

    def __init__(
        self,
        identity: Identity,
        regions: Sequence[Region],
        transport: Transport,
        bind_address: str,
        settings: TransferSettings,
        wake: Callable[[], None],
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self._identity = identity
        self._scratch = SourceScratch(identity.epoch)
        self._regions = (*regions, self._scratch.region)
        self._transport = transport
        self._bind_address = bind_address
        self._settings = settings
        self._wake = wake
        self._clock = clock
        self._events: deque[SourceEvent] = deque()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._gate: AddressGate | None = None
        self._protocol: SourceProtocol | None = None
        self._digests = OfferDigests(regions, identity.block_size) if settings.verify_kv else None
        self.control_address = ""
        self.local_address = ""
        """The same from this host, whatever is advertised."""
        self._pump = Pump("handover-source", self._set_up, self._turn, self._tear_down, self._count_error)
        self._pump.start()

    def announce(self, announcement: Announcement) -> None:
        """A part of the prompt is computed. `LayoutError` if the blocks do not fit the tokens or the pool."""
        ids = check_announcement(announcement, self._identity.block_size, self._regions)
        self._pump.post(lambda: self._announced(announcement, ids))

    def offer(self, offer: Offer) -> None:
        """The prompt is computed. `LayoutError` if the blocks do not fit the tokens or the pool."""
        ids = check_offer(offer, self._identity.block_size, self._regions)
        self._pump.post(lambda: self._offer(offer, ids))

    def withdraw(self, handover_id: str) -> None:
        """Take it back. If it was offered, `Released` follows once no reader holds it."""
        self._pump.post(lambda: self._withdraw(handover_id))

    def events(self) -> list[SourceEvent]:
        """What happened since the last call, in order."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def stats(self) -> SourceStats:
        protocol = self._ready
        counters = protocol.counters
        return SourceStats(
            num_pinned=protocol.ledger.num_pinned,
            num_waiting=protocol.ledger.num_waiting,
            num_peers=protocol.num_peers,
            announcements=counters.announcements,
            offers=counters.offers,
            ends_by_reason=dict(counters.ends),
            refusals_by_field=dict(counters.refusals),
            leases_granted=counters.leases_granted,
            leases_renewed=counters.leases_renewed,
            leases_expired=counters.leases_expired,
            late_releases=counters.late_releases,
            ignored_by_kind=dict(counters.ignored),
            internal_errors=counters.internal_errors,
        )

    def peers(self) -> tuple[TransferPeer, ...]:
        """The readers that have held leases, and what became of those."""
        readers = list(self._ready.counters.leases_by_peer.items())
        return tuple(TransferPeer(engine_id=name, leases_by_event=dict(counts)) for name, counts in readers)

    def close(self) -> None:
        """Stop serving; readers see the connection go. No event follows. Idempotent."""
        self._pump.stop()

    @property
    def _ready(self) -> SourceProtocol:
        assert self._protocol is not None
        return self._protocol

    # In the pump thread

    def _set_up(self) -> None:
        self._socket = control_router(self._context, self._settings)
        self._set_up_gate(self._socket)
        endpoint = bind(self._socket, self._bind_address)
        if self._gate is not None:
            self._gate.admit(local_host(endpoint))
        self.control_address = advertised(endpoint, self._settings.advertise_host)
        self.local_address = advertised(endpoint, LOCAL_HOST)
        blob = self._transport.register(self._regions, endpoint)
        served = Served(self._transport.name, self._transport.version, blob, self._regions)
        self._protocol = SourceProtocol(
            self._identity, served, self._settings, self._send, self._events.append
        )
        self._pump.poller.register(self._socket, zmq.POLLIN)

    def _set_up_gate(self, socket: "zmq.Socket[bytes]") -> None:
        networks = self._settings.allowed_networks
        if networks:
            self._gate = AddressGate(self._context, networks)
            self._gate.guard(socket)
            self._pump.poller.register(self._gate.socket, zmq.POLLIN)

    def _announced(self, announcement: Announcement, ids: BlockIds) -> None:
        if self._digests is not None:
            self._digests.announce(announcement, ids)
        self._ready.ledger.announce(announcement, ids, self._clock())

    def _offer(self, offer: Offer, ids: BlockIds) -> None:
        if self._digests is None:
            self._ready.ledger.offer(offer, ids, self._clock())
        else:
            self._digests.offer(offer, ids)

    def _withdraw(self, handover_id: str) -> None:
        if self._digests is not None:
            self._digests.withdraw(handover_id)
        self._ready.ledger.withdraw(handover_id, self._clock())

    def _hash(self) -> bool:
        """A slice of the digests under way; True if there is more to do."""
        if self._digests is None:
            return False
        for offer, ids, digests in self._digests.work():
            self._ready.ledger.offer(offer, ids, self._clock(), digests)
        return self._digests.is_busy

    def _turn(self) -> float:
        assert self._socket is not None
        if self._gate is not None:
            self._ready.counters.refusals["address"] += self._gate.serve()
        frames = receive_all(self._socket)
        for reader, *payload in frames:
            self._ready.on_frames(reader, payload, self._clock())
        is_hashing = self._hash()
        self._ready.ledger.expire(self._clock())
        self._announce()
        return 0.0 if frames or is_hashing else IDLE_S

    def _announce(self) -> None:
        if self._events:
            self._wake()

    def _send(self, reader: ReaderId, message: ToSink) -> None:
        assert self._socket is not None
        try:
            self._socket.send_multipart([reader, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # The reader is gone or does not read: its leases expire.
            self._ready.counters.ignored["unreachable"] += 1
            logger.debug("a %s could not be sent: %s", type(message).__name__, error)

    def _count_error(self) -> None:
        if self._protocol is not None:
            self._protocol.counters.internal_errors += 1

    def _tear_down(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._gate is not None:
            self._gate.close()
        self._transport.close()
        self._context.term()
