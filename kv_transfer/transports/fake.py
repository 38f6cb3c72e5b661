"""An in-process transport for tests: numpy copies, with faults on request."""

import uuid
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import zmq

from kv_transfer.errors import PeerLost
from kv_transfer.layout import Region
from kv_transfer.transport import BlockRead, ReadResult, RemoteMemory, merge_runs
from kv_transfer.transports.raw import region_view

_served: dict[bytes, list[npt.NDArray[np.uint8]]] = {}
"""Every source of this process by its blob."""


class FakeTransport:
    """Reads complete at the poll after they were started, unless one of the switches says otherwise."""

    name = "fake"
    version = "1"

    def __init__(self) -> None:
        self.stalled = False
        """Reads stay in progress, and cannot be cancelled: a peer that is stopped."""
        self.next_error: str | None = None
        """The next read fails with this."""
        self.corrupt: set[int] = set()
        """Local blocks into which wrong bytes are written."""
        self.spares_self_tests = True
        """The switches and counters are for the reads of hand-overs only."""
        self.num_open = 0
        self.num_reads = 0
        self.num_blocks_in_last_read = 0
        self._num_permitted = 0
        self._views: list[npt.NDArray[np.uint8]] = []
        self._blob: bytes | None = None

    def register(self, regions: Sequence[Region], serve_at: str | None) -> bytes:
        self._views = [region_view(region) for region in regions]
        if serve_at is None:
            return b""
        self._blob = uuid.uuid4().bytes
        _served[self._blob] = self._views
        return self._blob

    def connect(self, memory: RemoteMemory, regions: Sequence[Region] | None = None) -> "FakeConnection":
        if memory.blob not in _served:
            raise PeerLost("the fake source is closed")
        views = self._views if regions is None else [region_view(region) for region in regions]
        return FakeConnection(self, memory, views)

    def spares(self, memory: RemoteMemory, reads: Sequence[BlockRead]) -> bool:
        return self.spares_self_tests and any(memory.regions[read.region].kind == "scratch" for read in reads)

    def finish_one(self) -> None:
        """Let the oldest read end although reads are stalled."""
        self._num_permitted += 1

    def take_permitted(self, num_pending: int) -> int:
        """How many reads end at this poll."""
        if not self.stalled:
            return num_pending
        num_over, self._num_permitted = min(self._num_permitted, num_pending), 0
        return num_over

    def close(self) -> None:
        if self._blob is not None:
            _served.pop(self._blob, None)


class FakeConnection:
    def __init__(
        self, transport: FakeTransport, memory: RemoteMemory, views: list[npt.NDArray[np.uint8]]
    ) -> None:
        self._transport, self._blob, self._views = transport, memory.blob, views
        self._memory = memory
        self._remote_shapes = [(region.num_blocks, region.block_bytes) for region in memory.regions]
        self._pending: dict[int, Sequence[BlockRead]] = {}
        self._spared: dict[int, Sequence[BlockRead]] = {}
        self._next_id = 1
        self._closed = False
        transport.num_open += 1

    @property
    def path(self) -> str:
        return "fake"

    @property
    def waitable(self) -> "zmq.Socket[bytes] | None":
        return None

    def read(self, reads: Sequence[BlockRead]) -> int:
        read_id, self._next_id = self._next_id, self._next_id + 1
        if self._transport.spares(self._memory, reads):
            self._spared[read_id] = reads
            return read_id
        self._transport.num_reads += 1
        self._transport.num_blocks_in_last_read = sum(item.local_ids.size for item in reads)
        self._pending[read_id] = reads
        return read_id

    def poll(self) -> list[ReadResult]:
        num_over = self._transport.take_permitted(len(self._pending))
        over = list(self._pending.items())[:num_over]
        for read_id, _ in over:
            del self._pending[read_id]
        spared, self._spared = self._spared, {}
        return [self._copy(*item) for item in spared.items()] + [self._finish(*item) for item in over]

    def _finish(self, read_id: int, reads: Sequence[BlockRead]) -> ReadResult:
        error, self._transport.next_error = self._transport.next_error, None
        return self._copy(read_id, reads) if error is None else ReadResult(read_id, error)

    def _copy(self, read_id: int, reads: Sequence[BlockRead]) -> ReadResult:
        if self._blob not in _served:
            return ReadResult(read_id, "the fake source is closed", peer_lost=True)
        for read in reads:
            source = self._memory.source_of(read.region)
            remote = _served[self._blob][source].reshape(self._remote_shapes[read.region])
            local = self._views[read.region]
            runs = merge_runs(read.remote_ids, read.local_ids)
            for source, target, length in zip(
                runs.remote_starts, runs.local_starts, runs.lengths, strict=True
            ):
                local[target : target + length] = remote[source : source + length]
            wrong = self._transport.corrupt & set(read.local_ids.tolist())
            local[sorted(wrong)] ^= 1
        return ReadResult(read_id)

    def cancel(self, read_id: int) -> bool:
        if self._transport.stalled:
            return read_id not in self._pending
        self._pending.pop(read_id, None)
        return True

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pending.clear()
            self._transport.num_open -= 1
