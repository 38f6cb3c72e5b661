"""Small pools, identities, and a source and a sink joined without sockets on a clock that tests set."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kv_transfer.events import SinkEvent, SourceEvent
from kv_transfer.layout import Identity, Region
from kv_transfer.memory import HugePageRegion
from kv_transfer.messages import ChoiceStart, Prefix, ToSink, ToSource, encode
from kv_transfer.offers import Announcement, Offer, check_announcement, check_offer
from kv_transfer.settings import TransferSettings
from kv_transfer.sink_session import PeerSession
from kv_transfer.source_protocol import Served, SourceProtocol
from kv_transfer.stats import SinkCounters
from kv_transfer.transports.fake import FakeTransport
from wire.services import PromptEngineAddress

BLOCK_SIZE = 4
NUM_BLOCKS = 16
BLOCK_BYTES = 4096
COMPATIBILITY = {"block_size": str(BLOCK_SIZE), "dtype": "float32", "model": "tiny"}


class Pool:
    """KV blocks and state rows; block or row i of a source is filled with the byte i + 1."""

    def __init__(
        self,
        num_blocks: int = NUM_BLOCKS,
        block_bytes: int = BLOCK_BYTES,
        num_slots: int = 4,
        slot_bytes: int = 512,
        num_parts: int = 1,
    ) -> None:
        self._kv = HugePageRegion(num_blocks * block_bytes)
        self._state = HugePageRegion(num_slots * slot_bytes)
        self.kv: npt.NDArray[np.uint8] = self._kv.buffer.reshape(num_blocks, block_bytes)
        self.state: npt.NDArray[np.uint8] = self._state.buffer.reshape(num_slots, slot_bytes)
        self.regions = (
            Region("kv", self._kv.address, block_bytes, num_blocks, num_parts),
            Region("state", self._state.address, slot_bytes, num_slots),
        )

    def fill(self) -> "Pool":
        self.kv[:] = (np.arange(len(self.kv)) % 255 + 1).astype(np.uint8)[:, None]
        self.state[:] = (np.arange(len(self.state)) + 101).astype(np.uint8)[:, None]
        return self

    def holds(self, block_ids: Sequence[int], source_ids: Sequence[int]) -> bool:
        """Blocks `block_ids` here equal blocks `source_ids` of a filled source, and no other is written."""
        expected = np.zeros_like(self.kv)
        expected[list(block_ids)] = (np.asarray(source_ids) % 255 + 1).astype(np.uint8)[:, None]
        return bool(np.array_equal(self.kv, expected))


def identity(engine_id: str = "prompt-0", epoch: int = 1, **compatibility: str) -> Identity:
    return Identity(engine_id, epoch, COMPATIBILITY | compatibility)


FIRST = (ChoiceStart(0, 42),)
"""What one choice goes on from."""


def offer(
    handover_id: str = "h", num_tokens: int = 6, block_ids: Sequence[int] = (3, 5), slot: int | None = None
) -> Offer:
    return Offer(handover_id, num_tokens, block_ids, slot, FIRST)


@dataclass
class Wire:
    """Messages under way in one direction; `cut` loses them, `hold` keeps them."""

    frames: deque[bytes] = field(default_factory=deque)
    cut: bool = False
    hold: bool = False

    def put(self, frame: bytes) -> None:
        if not self.cut:
            self.frames.append(frame)

    def take(self) -> list[bytes]:
        if self.hold:
            return []
        taken = list(self.frames)
        self.frames.clear()
        return taken


class Reader:
    """A sink session on the virtual clock of its `Pair`."""

    def __init__(
        self,
        pair: "Pair",
        reader_id: bytes,
        address: PromptEngineAddress,
        settings: TransferSettings,
        pool: Pool,
        own_identity: Identity,
    ) -> None:
        self.reader_id = reader_id
        self.pool = pool
        self.transport = FakeTransport()
        self.transport.register(self.pool.regions, None)
        self.counters = SinkCounters()
        self.to_source = Wire()
        self.to_sink = Wire()
        self.events: list[SinkEvent] = []
        self.session = PeerSession(
            address,
            own_identity,
            self.pool.regions,
            self.transport,
            settings,
            self.counters,
            self._send,
            self.events.append,
            pair.now_s,
        )
        self._pair = pair
        self.session.start()

    def _send(self, message: ToSource) -> None:
        self.to_source.put(encode(message))

    def request(self, handover_id: str = "h", deadline_s: float = 60.0, prefix: Prefix | None = None) -> None:
        self.session.request(handover_id, self._pair.now_s + deadline_s, self._pair.now_s, prefix)

    def pull(
        self,
        local_ids: Sequence[int] = (7, 8),
        handover_id: str = "h",
        slot: int | None = None,
        first_block: int = 0,
    ) -> None:
        ids = np.array(local_ids, dtype=np.int32)
        self.session.pull(handover_id, ids, slot, first_block, self._pair.now_s)

    def abandon(self, handover_id: str = "h") -> None:
        self.session.abandon(handover_id, self._pair.now_s)

    def decline(self, handover_id: str = "h") -> None:
        self.session.decline(handover_id, self._pair.now_s)

    def take_events(self) -> list[SinkEvent]:
        taken = list(self.events)
        self.events.clear()
        return taken


class Pair:
    """One source and its readers. Nothing moves until `run` or `advance`."""

    def __init__(
        self,
        settings: TransferSettings | None = None,
        source_identity: Identity | None = None,
        reader_pool: Pool | None = None,
        reader_identity: Identity | None = None,
    ) -> None:
        self.settings = settings or TransferSettings()
        self.now_s = 100.0
        self.identity = source_identity or identity()
        self.pool = Pool().fill()
        self.transport = FakeTransport()
        self._blob = self.transport.register(self.pool.regions, "inproc://control")
        self.events: list[SourceEvent] = []
        self.readers: dict[bytes, Reader] = {}
        self.source = self._new_source()
        self._reader_identity = reader_identity or identity("completion-0", 9)
        self.reader = self.add_reader(pool=reader_pool)

    def _new_source(self) -> SourceProtocol:
        served = Served("fake", "1", self._blob, self.pool.regions)
        return SourceProtocol(self.identity, served, self.settings, self._send, self.events.append)

    def _send(self, reader_id: bytes, message: ToSink) -> None:
        if reader_id in self.readers:
            self.readers[reader_id].to_sink.put(encode(message))

    def address(self) -> PromptEngineAddress:
        return PromptEngineAddress(
            engine_id=self.identity.engine_id, epoch=self.identity.epoch, control_address="inproc://control"
        )

    def add_reader(self, address: PromptEngineAddress | None = None, pool: Pool | None = None) -> Reader:
        reader_id = f"reader-{len(self.readers)}".encode()
        address, pool = address or self.address(), pool or Pool()
        reader = Reader(self, reader_id, address, self.settings, pool, self._reader_identity)
        self.readers[reader_id] = reader
        return reader

    def offer(self, item: Offer | None = None) -> None:
        item = item or offer()
        ids = check_offer(item, self.identity.block_size, self.pool.regions)
        self.source.ledger.offer(item, ids, self.now_s)

    def announce(
        self, block_ids: Sequence[int], num_tokens: int = 6, handover_id: str = "h", attempt: int = 0
    ) -> None:
        item = Announcement(handover_id, num_tokens, block_ids, attempt)
        ids = check_announcement(item, self.identity.block_size, self.pool.regions)
        self.source.ledger.announce(item, ids, self.now_s)

    def withdraw(self, handover_id: str = "h") -> None:
        self.source.ledger.withdraw(handover_id, self.now_s)

    def run(self) -> None:
        """Deliver messages and finish reads until nothing moves."""
        while self._step():
            self.check_invariants()
        self.check_invariants()

    def _step(self) -> bool:
        moved = False
        for reader in self.readers.values():
            for frame in reader.to_source.take():
                self.source.on_frames(reader.reader_id, [frame], self.now_s)
                moved = True
            for frame in reader.to_sink.take():
                reader.session.on_frames([frame], self.now_s)
                moved = True
            moved |= reader.session.poll(self.now_s)
        return moved

    def advance(self, seconds: float, step_s: float = 0.1) -> None:
        """Let time pass, with the ticks and messages that fall into it."""
        until_s = self.now_s + seconds
        while self.now_s < until_s - 1e-9:
            self.now_s = min(until_s, self.now_s + step_s)
            self.source.ledger.expire(self.now_s)
            for reader in self.readers.values():
                reader.session.tick(self.now_s)
            self.run()

    def take_events(self) -> list[SourceEvent]:
        taken = list(self.events)
        self.events.clear()
        return taken

    def check_invariants(self) -> None:
        self.source.ledger.check_invariants()
        for reader in self.readers.values():
            reader.session.check_invariants()
