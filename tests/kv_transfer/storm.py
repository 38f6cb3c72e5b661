"""Hand-overs under random faults, on a virtual clock: the real ledgers and sessions, with a fake link.

Every hand-over's blocks hold bytes of its own, and a source block that comes back is overwritten at once, as
the next prompt would. So a sink that believes a stale read is found out by its bytes.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kv_transfer.digests import source_digests
from kv_transfer.events import Arrived, Failed, Offered, Reclaimable
from kv_transfer.offers import check_offer
from kv_transfer.settings import TransferSettings
from kv_transfer.transports.fake import FakeTransport
from tests.kv_transfer.builders import NUM_BLOCKS, Pair, Reader, offer

BLOCKS_OF_ONE = 2
END_LIMIT_S = 25.0
"""A hand-over has ended this long after it was requested, whatever happens."""

SETTINGS = TransferSettings(
    lease_s=2.0,
    connect_timeout_s=1.0,
    read_timeout_s=1.0,
    confirm_timeout_s=1.0,
    fence_after_s=3.0,
)
OFFER_LIMIT_S = 10.0


@dataclass(slots=True)
class Life:
    """One hand-over as its two engines see it."""

    handover_id: str
    fill: int
    requested_s: float
    offered_at: float
    source_ids: tuple[int, ...] = ()
    local_ids: tuple[int, ...] = ()
    has_failed: bool = False


class Storm:
    """`outcomes` counts how hand-overs ended, by event or reason."""

    def __init__(self, seed: int, verify_kv: bool = True) -> None:
        self.seed = seed
        self.verify_kv = verify_kv
        self.outcomes: Counter[str] = Counter()
        self.num_faults = 0
        self._chance = random.Random(seed)
        self._pair = Pair(replace(SETTINGS, verify_kv=self.verify_kv))
        self._reader = self._pair.reader
        self._lives: dict[str, Life] = {}
        self._heal_at: list[tuple[float, Callable[[], None]]] = []
        self._source_free = list(range(1, NUM_BLOCKS))
        self._local_free = list(range(1, NUM_BLOCKS))
        self._held: dict[str, tuple[int, ...]] = {}
        """Blocks that P keeps for a reader, by hand-over."""
        self._is_calm = False
        self._num_begun = 0
        self._num_readers = 1
        self._faults: list[Callable[[], None]] = [
            self._cut_link,
            self._hold_one_direction,
            self._stall_reads,
            self._fail_next_read,
            self._corrupt,
            self._withdraw,
            self._abandon,
            self._restart_source,
            self._restart_sink,
            self._stop_source,
            self._jump_clock_of_source,
        ]

    # The course of things

    def run(self, num_faults: int) -> None:
        """`num_faults` faults, then fair weather until everything has ended; AssertionError if not."""
        while self.num_faults < num_faults:
            self.turn(self._chance.uniform(0.02, 0.5))
            if self._chance.random() < 0.5:
                self.num_faults += 1
                self._chance.choice(self._faults)()
        self._is_calm = True
        self._reader.transport.next_error = None
        while self._heal_at:
            self._heal_at.pop()[1]()
        for _ in range(100):
            self.turn(0.5, begin=False)
        self.check_nothing_is_left()
        before = self.outcomes["arrived"]
        while not self._begin(later_s=0.0):
            self.turn(0.5, begin=False)
        for _ in range(10):
            self.turn(0.5, begin=False)
        assert self.outcomes["arrived"] > before, f"seed {self.seed}: nothing arrives after the storm"

    def turn(self, seconds: float, *, begin: bool = True) -> None:
        now_s = self._pair.now_s
        for item in [item for item in self._heal_at if item[0] <= now_s]:
            self._heal_at.remove(item)
            item[1]()
        if begin and self._chance.random() < 0.7:
            self._begin(self._chance.choice((0.0, 0.0, 0.3, 3.0)))
        self._pair.run()
        self._pair.advance(seconds, step_s=0.05)
        self._take_sink_events()
        self._offer_what_is_due()
        self._take_source_events()
        for life in self._lives.values():
            waited_s = self._pair.now_s - life.requested_s
            assert life.has_failed or waited_s < END_LIMIT_S, f"seed {self.seed}: {life} hangs"

    def check_nothing_is_left(self) -> None:
        where = f"seed {self.seed}"
        assert not self._lives, f"{where}: {self._lives}"
        assert sorted(self._source_free) == list(range(1, NUM_BLOCKS)), where
        assert sorted(self._local_free) == list(range(1, NUM_BLOCKS)), where
        ledger, session = self._pair.source.ledger, self._reader.session
        assert (ledger.num_pinned, ledger.num_waiting) == (0, 0), where
        assert (session.num_handovers, session.num_reads, session.num_quarantined_blocks) == (0, 0, 0), where
        assert self._pair.transport.num_open + self._reader.transport.num_open <= 1, where

    # What engines do

    def _begin(self, later_s: float) -> bool:
        """Both legs of a new hand-over; P has computed it `later_s` later."""
        session = self._reader.session
        is_stale = session.address != self._pair.address() and session.num_handovers == 0
        if session.is_lost or is_stale:  # the proxy knows the new epoch
            self._reconnect()
        if len(self._source_free) < 2 * BLOCKS_OF_ONE or len(self._local_free) < BLOCKS_OF_ONE:
            return False
        self._num_begun += 1
        now_s = self._pair.now_s
        life = Life(f"h{self._num_begun}", self._num_begun % 251 + 1, now_s, now_s + later_s)
        self._lives[life.handover_id] = life
        self._reader.request(life.handover_id, OFFER_LIMIT_S)
        return True

    def _offer_what_is_due(self) -> None:
        for life in list(self._lives.values()):
            is_due = not life.source_ids and life.offered_at <= self._pair.now_s
            if not is_due or len(self._source_free) < BLOCKS_OF_ONE:
                continue
            life.source_ids = tuple(self._source_free.pop() for _ in range(BLOCKS_OF_ONE))
            self._pair.pool.kv[list(life.source_ids)] = life.fill
            item = offer(life.handover_id, 6, life.source_ids)
            ids = check_offer(item, 4, self._pair.pool.regions)
            found = source_digests(self._pair.pool.regions, 4, 6, ids, None) if self.verify_kv else b""
            self._pair.source.ledger.offer(item, ids, self._pair.now_s, found)
            self._held[life.handover_id] = life.source_ids

    def _take_source_events(self) -> None:
        for event in self._pair.take_events():
            self._free_at_source(event.handover_id)

    def _free_at_source(self, handover_id: str) -> None:
        block_ids = self._held.pop(handover_id)
        self._pair.pool.kv[list(block_ids)] = 255
        self._source_free += block_ids

    def _take_sink_events(self) -> None:
        for event in self._reader.take_events():
            life = self._lives[event.handover_id]
            match event:
                case Offered():
                    self._on_offered(life)
                case Arrived():
                    found = self._reader.pool.kv[list(life.local_ids)]
                    assert (found == life.fill).all(), f"seed {self.seed}: wrong bytes in {life}"
                    self._end(life, "arrived")
                case Failed(reason=reason, blocks_safe=blocks_safe):
                    life.has_failed = True
                    if blocks_safe:
                        self._end(life, reason)
                case Reclaimable():
                    self._end(life, "reclaimed")

    def _on_offered(self, life: Life) -> None:
        if len(self._local_free) < BLOCKS_OF_ONE or (not self._is_calm and self._chance.random() < 0.1):
            self._reader.decline(life.handover_id)
            self._pair.withdraw(life.handover_id)  # the proxy finds no other reader
            return
        life.local_ids = tuple(self._local_free.pop() for _ in range(BLOCKS_OF_ONE))
        self._reader.pull(life.local_ids, life.handover_id)

    def _end(self, life: Life, outcome: str) -> None:
        self.outcomes[outcome] += 1
        self._local_free += life.local_ids
        del self._lives[life.handover_id]
        if not life.source_ids:
            self._pair.withdraw(life.handover_id)  # its prompt is aborted

    def _reconnect(self) -> None:
        """A new session, as `HandoverSink` makes one for the next request."""
        self._take_sink_events()
        pool = self._reader.pool
        del self._pair.readers[self._reader.reader_id]
        self._reader = self._new_reader()
        self._reader.pool.kv[:] = pool.kv

    def _new_reader(self) -> Reader:
        """Under an id that no reader had before."""
        reader = self._pair.add_reader()
        del self._pair.readers[reader.reader_id]
        self._num_readers += 1
        reader.reader_id = f"new-{self._num_readers}".encode()
        self._pair.readers[reader.reader_id] = reader
        return reader

    # Faults

    def _later(self, seconds: float, heal: Callable[[], None]) -> None:
        self._heal_at.append((self._pair.now_s + seconds, heal))

    def _cut_link(self) -> None:
        """Both directions lose everything for 1, 3 or 30 s."""
        reader = self._reader

        def set_cut(cut: bool) -> None:
            reader.to_source.cut = reader.to_sink.cut = cut
            reader.transport.stalled = cut

        set_cut(True)
        self._later(self._chance.choice((1.0, 3.0, 30.0)), lambda: set_cut(False))

    def _hold_one_direction(self) -> None:
        """Messages come late, all at once."""
        wire = self._chance.choice((self._reader.to_source, self._reader.to_sink))
        wire.hold = True
        self._later(self._chance.uniform(0.1, 4.0), lambda: setattr(wire, "hold", False))

    def _stop_source(self) -> None:
        """SIGSTOP: nothing is read or answered, then everything is."""
        reader = self._reader
        reader.to_source.hold = reader.transport.stalled = True

        def resume() -> None:
            reader.to_source.hold = reader.transport.stalled = False

        self._later(self._chance.uniform(0.5, 5.0), resume)

    def _stall_reads(self) -> None:
        transport = self._reader.transport
        transport.stalled = True
        self._later(self._chance.uniform(0.5, 8.0), lambda: setattr(transport, "stalled", False))

    def _fail_next_read(self) -> None:
        self._reader.transport.next_error = "injected"

    def _corrupt(self) -> None:
        """Bytes arrive wrong for a while; only digests can tell."""
        if self.verify_kv:
            transport = self._reader.transport
            transport.corrupt = set(self._chance.sample(range(1, NUM_BLOCKS), 5))
            self._later(1.0, transport.corrupt.clear)

    def _withdraw(self) -> None:
        if self._lives:
            life = self._chance.choice(list(self._lives.values()))
            if life.source_ids:
                self._pair.withdraw(life.handover_id)

    def _abandon(self) -> None:
        if self._lives:
            self._reader.abandon(self._chance.choice(list(self._lives)))

    def _restart_source(self) -> None:
        """kill -9 and a new start at the same address: other memory, another epoch."""
        pair = self._pair
        pair.transport.close()
        pair.transport = FakeTransport()
        pair.identity = replace(pair.identity, epoch=pair.identity.epoch + 1)
        pair._blob = pair.transport.register(pair.pool.regions, "inproc://control")
        pair.take_events()
        for handover_id in list(self._held):
            self._free_at_source(handover_id)
        pair.source = pair._new_source()
        for life in self._lives.values():
            life.source_ids = life.source_ids or (0,)  # its prompt died with the engine
        if self._chance.random() < 0.5:  # otherwise the link's end is not seen, only silence
            self._reader.session.lose("peer_lost", "the connection is gone", pair.now_s)

    def _jump_clock_of_source(self) -> None:
        """Every lease is over at the source, while the sink still believes in it; links may even be cut."""
        self._pair.source.ledger.expire(self._pair.now_s + 100.0)
        self._take_source_events()

    def _restart_sink(self) -> None:
        """kill -9 of D: its requests are gone, P hears nothing more."""
        pair = self._pair
        del pair.readers[self._reader.reader_id]
        for life in list(self._lives.values()):
            self._lives.pop(life.handover_id)
            self.outcomes["sink died"] += 1
            if not life.source_ids:
                pair.withdraw(life.handover_id)
        self._local_free = list(range(1, NUM_BLOCKS))
        self._reader = self._new_reader()
        assert np.count_nonzero(self._reader.pool.kv) == 0
