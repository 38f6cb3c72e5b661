"""The completion engine's end of the hand-over.

The engine calls `request`, gets `Offered` when the first chunk is computed, allocates, calls `pull`, gets
`Arrived` when everything is here. `abandon` works at any stage. Every decision is `PeerSession`'s, one for
each prompt engine process; this module joins them to sockets, a clock and a thread.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from kv_transfer.breaker import Breakers
from kv_transfer.events import Failed, FailReason, SinkEvent
from kv_transfer.layout import BlockIds, Identity, Region, as_block_ids
from kv_transfer.messages import Prefix, ToSource, encode
from kv_transfer.pump import BUSY_S, IDLE_S, Clock, Pump
from kv_transfer.self_test import SinkScratch
from kv_transfer.settings import TransferSettings
from kv_transfer.sink_link import SinkLink
from kv_transfer.sink_peers import SinkPeers
from kv_transfer.sink_session import PeerSession
from kv_transfer.sockets import receive_all
from kv_transfer.stats import SinkCounters, SinkStats
from kv_transfer.transport import Transport
from wire.services import PromptEngineAddress
from wire.transfer import PeerState, TransferPeer

logger = logging.getLogger(__name__)

TICK_S = 0.02

REPORT_S = 0.2
"""Reports of peers are this old at most: they are asked for at every step."""

_PEERS_FAULTS: tuple[FailReason, ...] = ("peer_lost", "connect_failed", "self_test_failed")


class HandoverSink:
    """Fetches computed prompts. Thread-safe; owns one pump thread and the transport.

    `wake` is called from the pump thread whenever `events` has something new; it must not block. Raises
    `TransportUnavailable`; nothing is left open then.
    """

    def __init__(
        self,
        identity: Identity,
        regions: Sequence[Region],
        transport: Transport,
        settings: TransferSettings,
        wake: Callable[[], None],
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self._identity = identity
        self._scratch = SinkScratch()
        self._regions = (*regions, self._scratch.region)
        self._transport = transport
        self._settings = settings
        self._wake = wake
        self._clock = clock
        self._known = SinkPeers()
        self._events: deque[SinkEvent] = deque()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers: dict[PromptEngineAddress, tuple[PeerSession, SinkLink]] = {}
        self._owner: dict[str, PeerSession] = {}
        """Hand-over id to its session; entries of ended hand-overs go at the next tick."""
        self._breakers = Breakers(settings)
        self._report: tuple[TransferPeer, ...] = ()
        self._report_until_s = clock()
        self._next_tick_s = clock()
        self._pump = Pump("handover-sink", self._set_up, self._turn, self._tear_down, self._count_error)
        self._pump.start()

    def request(
        self,
        handover_id: str,
        prompt_engine: PromptEngineAddress,
        deadline_s: float | None = None,
        *,
        prefix: Prefix | None = None,
    ) -> None:
        """Ask for a hand-over; `deadline_s` seconds are allowed until its prompt is computed.

        `prefix`: borrow what that engine has cached instead; `Offered` says how much of it there is.
        """
        limit_s = self._settings.offer_timeout_s if deadline_s is None else deadline_s
        self._pump.post(lambda: self._request(handover_id, prompt_engine, limit_s, prefix))

    def pull(
        self,
        handover_id: str,
        local_block_ids: Sequence[int] | BlockIds,
        local_state_slot: int | None = None,
        *,
        first_block: int = 0,
    ) -> None:
        """After `Offered`: read the blocks from `first_block` on into `local_block_ids`, in order.

        Those that are not computed yet follow as they are announced. The destination must stay allocated
        until the final event. A wrong number of blocks is `Failed` with reason bad_pull; a hand-over that has
        ended meanwhile is ignored, its event says why.
        """
        ids = as_block_ids(local_block_ids)
        self._pump.post(lambda: self._pull(handover_id, ids, local_state_slot, first_block))

    def abandon(self, handover_id: str) -> None:
        """Give up at any stage. The final event is `Reclaimable`, or the one that was already under way."""
        self._pump.post(lambda: self._abandon(handover_id))

    def decline(self, handover_id: str) -> None:
        """As `abandon`, but the prompt engine keeps it, for one lease, for another reader."""
        self._pump.post(lambda: self._decline(handover_id))

    def events(self) -> list[SinkEvent]:
        """What happened since the last call, in order."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def stats(self) -> SinkStats:
        counters = self._known.total()
        sessions = [session for session, _ in list(self._peers.values())]
        return SinkStats(
            num_handovers=sum(session.num_handovers for session in sessions),
            num_peers=sum(session.is_ready for session in sessions),
            num_quarantined_blocks=sum(session.num_quarantined_blocks for session in sessions),
            num_paused_peers=len(self._breakers.paused_engines()),
            requests=counters.requests,
            arrived=counters.arrived,
            abandoned=counters.abandoned,
            failures_by_reason=dict(counters.failures),
            bytes_read=counters.bytes_read,
            blocks_read=counters.blocks_read,
            bytes_skipped=counters.bytes_skipped,
            blocks_skipped=counters.blocks_skipped,
            renewals=counters.renewals,
            fences=counters.fences,
            quarantined_blocks=counters.quarantined_blocks,
            seconds_by_stage=dict(counters.stage_s),
            counts_by_stage=dict(counters.stage_counts),
            ignored_by_kind=dict(counters.ignored),
            internal_errors=counters.internal_errors,
        )

    def peers(self) -> tuple[TransferPeer, ...]:
        """Every prompt engine met so far; at most a few moments old."""
        now_s = self._clock()
        if now_s >= self._report_until_s:
            self._report = self._known.report(self._states())
            self._report_until_s = now_s + REPORT_S
        return self._report

    def _states(self) -> dict[str, PeerState]:
        states: dict[str, PeerState] = dict.fromkeys(self._breakers.paused_engines(), "paused")
        for address, (session, _) in list(self._peers.items()):
            states[address.engine_id] = "ready" if session.is_ready else "connecting"
        return states

    def close(self) -> None:
        """Let go of every hand-over and fence every read; open ones end with `Failed(closed)`. Idempotent."""
        self._pump.stop()

    # In the pump thread

    def _set_up(self) -> None:
        self._transport.register(self._regions, None)

    def _request(
        self, handover_id: str, address: PromptEngineAddress, limit_s: float, prefix: Prefix | None
    ) -> None:
        owner = self._owner.get(handover_id)
        if owner is not None and handover_id in owner:
            self._known.nobody.ignored["duplicate"] += 1
            logger.error("hand-over %s is requested twice", handover_id)
            return
        known = self._known.at(address)
        known.counters.requests += 1
        now_s = self._clock()
        if self._num_handovers >= self._settings.max_handovers:
            text = f"max_handovers ({self._settings.max_handovers}) are under way"
            self._refuse(handover_id, text, known.counters)
            return
        paused = self._paused(address, now_s)
        if paused is not None:
            text = f"prompt engine {address.engine_id} at {address.control_address}: {paused}"
            self._refuse(handover_id, text, known.counters, "peer_paused")
            return
        session = self._session(address, now_s)
        if session is not None:
            self._owner[handover_id] = session
            session.request(handover_id, now_s + limit_s, now_s, prefix)
        else:
            self._refuse(handover_id, f"cannot connect to {address.control_address!r}", known.counters)

    @property
    def _num_handovers(self) -> int:
        return sum(session.num_handovers for session, _ in self._peers.values())

    def _refuse(
        self, handover_id: str, message: str, counters: SinkCounters, reason: FailReason = "refused"
    ) -> None:
        counters.failures[reason] += 1
        self._events.append(Failed(handover_id, reason, message, blocks_safe=True))

    def _paused(self, address: PromptEngineAddress, now_s: float) -> str | None:
        """Why this peer is left alone, if it is: not one whose session is ready."""
        self._remove_lost(now_s)
        session, _ = self._peers.get(address, (None, None))
        if session is not None and session.is_ready:
            return None
        return self._breakers.refusal(address, now_s)

    def _session(self, address: PromptEngineAddress, now_s: float) -> PeerSession | None:
        """The session with this process, new if need be; None if the address cannot be used."""
        if address in self._peers:
            return self._peers[address][0]
        if len(self._peers) >= self._settings.max_peers and not self._drop_idle_peer(now_s):
            return None
        try:
            link = SinkLink(address, self._context, self._pump.poller, self._settings, now_s)
        except zmq.ZMQError as error:
            logger.warning("cannot connect to %s: %s", address.control_address, error)
            return None
        session = PeerSession(
            address,
            self._identity,
            self._regions,
            self._transport,
            self._settings,
            self._known.at(address).counters,
            lambda message: self._send(link, message),
            self._events.append,
            now_s,
            self._scratch,
        )
        self._peers[address] = (session, link)
        self._breakers.trying(address)
        session.start()
        return session

    def _drop_idle_peer(self, now_s: float) -> bool:
        for address, (session, link) in self._peers.items():
            if session.num_handovers == 0:
                session.close(now_s)
                link.close()
                del self._peers[address]
                self._breakers.ended(address)
                return True
        return False

    def _pull(self, handover_id: str, ids: BlockIds, slot: int | None, first_block: int) -> None:
        session = self._owner.get(handover_id)
        if session is not None:
            session.pull(handover_id, ids, slot, first_block, self._clock())

    def _abandon(self, handover_id: str) -> None:
        session = self._owner.get(handover_id)
        if session is not None:
            session.abandon(handover_id, self._clock())

    def _decline(self, handover_id: str) -> None:
        session = self._owner.get(handover_id)
        if session is not None:
            session.decline(handover_id, self._clock())

    def _turn(self) -> float:
        now_s = self._clock()
        busy = False
        for address, (session, link) in self._peers.items():
            busy |= self._serve(session, link, now_s)
            if session.path is not None:
                self._known.at(address).path = session.path
        if now_s >= self._next_tick_s:
            self._tick(now_s)
            self._next_tick_s = now_s + TICK_S
        for session, link in self._peers.values():
            reading = session.connection if session.num_reads else None
            link.watch(None if reading is None else reading.waitable)
        if self._events:
            self._wake()
        return 0.0 if busy else self._idle_s()

    def _serve(self, session: PeerSession, link: SinkLink, now_s: float) -> bool:
        """One peer's messages, then its reads, then its health. True if more may be ready at once."""
        frames = receive_all(link.socket)
        for message in frames:
            session.on_frames(message, now_s)
        ended = session.poll(now_s)
        trouble = link.trouble(now_s)
        if trouble is not None:
            session.lose(*trouble, now_s)
        return bool(frames) or ended

    def _tick(self, now_s: float) -> None:
        for session, _ in self._peers.values():
            session.tick(now_s)
        self._remove_lost(now_s)
        self._owner = {id_: session for id_, session in self._owner.items() if id_ in session}

    def _remove_lost(self, now_s: float) -> None:
        for address, (session, link) in list(self._peers.items()):
            if session.has_read:
                self._breakers.worked(address)
            if session.lost is not None:
                link.close()
                del self._peers[address]
                reason, message = session.lost
                if reason in _PEERS_FAULTS:
                    self._breakers.failed(address, f"{reason}: {message}", now_s)
                else:
                    self._breakers.ended(address)

    def _idle_s(self) -> float:
        """0.1 ms while a read runs that no socket announces, a tick while a deadline runs, else long."""
        idle_s = IDLE_S
        for session, _ in self._peers.values():
            connection = session.connection
            if session.num_reads and connection is not None and connection.waitable is None:
                return BUSY_S
            if session.num_handovers or session.is_lost:
                idle_s = TICK_S
        return idle_s

    def _send(self, link: SinkLink, message: ToSource) -> None:
        try:
            link.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            # Its queue is full: it does not read. No answer will come, and the deadlines notice.
            self._known.at(link.address).counters.ignored["unsent"] += 1

    def _count_error(self) -> None:
        self._known.nobody.internal_errors += 1

    def _tear_down(self) -> None:
        now_s = self._clock()
        for session, link in self._peers.values():
            session.close(now_s)
            link.close()
        self._peers.clear()
        self._transport.close()
        self._context.term()
        if self._events:
            self._wake()
