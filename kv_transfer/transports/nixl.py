"""Reads over NIXL (UCX): same-host copy, TCP or RDMA, whatever UCX finds.

What is set here was measured to matter: the Python API's own progress thread spins, its default sync mode
crashes with several threads, and UCX's default time-outs never notice a cut link. There is one agent per
remote process, because destroying the agent is the only thing that stops a read for certain.
"""

import importlib
import importlib.metadata
import logging
import os
import time
import uuid
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import zmq

from kv_transfer.errors import PeerLost, ReadError, TransferError, TransportUnavailable
from kv_transfer.layout import BlockIds, Region
from kv_transfer.transport import BlockRead, ReadResult, RemoteMemory, sort_pairs
from kv_transfer.transports.ucx_log import LaneLog

logger = logging.getLogger(__name__)

UCX_DEFAULTS = {
    "UCX_TCP_CONN_NB": "y",
    "UCX_TCP_USER_TIMEOUT": "5s",
    "UCX_TCP_SYN_CNT": "2",
    "UCX_TCP_KEEPIDLE": "2s",
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_TCP_KEEPCNT": "3",
    "UCX_KEEPALIVE_INTERVAL": "2s",
    "UCX_TCP_TX_SEG_SIZE": "512k",
    "UCX_TCP_RX_SEG_SIZE": "1m",
}
"""Set before the import unless the user has set them."""

_PACKAGES = ("nixl_cu12", "nixl_cu13")

SOURCE_PROGRESS_US = 1000

PART_BYTES = 32 << 20
"""A same-host transfer copies inside the call; parts let the pump look at its other peers in between."""

POLL_BUDGET_S = 0.005

MAX_PREPARED = 1 << 20
"""Pieces of a side that are described once; of more, which single heads of token rows are, each read
describes its own."""


class NixlTransport:
    name = "nixl"

    def __init__(self, backend: str = "UCX") -> None:
        for key, value in UCX_DEFAULTS.items():
            os.environ.setdefault(key, value)
        self._backend = backend
        self._bindings, self.version = _load()
        self._regions: tuple[Region, ...] = ()
        self._source: _Agent | None = None
        self._spare: _Agent | None = None

    def register(self, regions: Sequence[Region], serve_at: str | None) -> bytes:
        self._regions = tuple(regions)
        if serve_at is None:
            # The first agent takes half a second and may fail: now, not at the first request.
            self._spare = self._agent(progress_thread=False)
            return b""
        self._source = self._agent(progress_thread=True)
        return self._source.metadata()

    def connect(self, memory: RemoteMemory, regions: Sequence[Region] | None = None) -> "NixlConnection":
        agent, self._spare = self._spare, None
        if agent is None:
            try:
                agent = self._agent(progress_thread=False)
            except TransferError as error:
                raise ReadError(str(error)) from error
        try:
            return NixlConnection(agent, memory, regions or self._regions)
        except Exception as error:
            agent.close()
            kind = PeerLost if agent.is_disconnect(error) else ReadError
            raise kind(f"NIXL cannot connect: {error}") from error

    def _agent(self, *, progress_thread: bool) -> "_Agent":
        return _Agent(self._bindings, self._backend, self._regions, progress_thread=progress_thread)

    def close(self) -> None:
        for agent in (self._source, self._spare):
            if agent is not None:
                agent.close()
        self._source = self._spare = None


_lane_log = LaneLog()
"""Of this process: UCX is loaded with the first agent."""


def _load() -> tuple[ModuleType, str]:
    reasons = []
    for package in _PACKAGES:
        try:
            bindings = importlib.import_module(f"{package}._bindings")
            return bindings, importlib.metadata.version(package.replace("_", "-"))
        except ImportError as error:
            reasons.append(str(error))
    raise TransportUnavailable(
        f"NIXL cannot be loaded ({reasons[0]}): install the extra with `pip install 'tandem-serve[nixl]'` "
        "or choose `--transport zmq`"
    )


class _Agent:
    """A NIXL agent with its memory registered; `close` destroys it, which fences everything it reads."""

    def __init__(
        self, bindings: ModuleType, backend: str, regions: Sequence[Region], *, progress_thread: bool
    ) -> None:
        config = bindings.nixlAgentConfig()
        config.useProgThread = progress_thread
        config.pthrDelay = SOURCE_PROGRESS_US
        config.useListenThread = False
        config.syncMode = bindings.NIXL_THREAD_SYNC_RW
        self.bindings = bindings
        self.name = uuid.uuid4().hex
        try:
            self.native = bindings.nixlAgent(self.name, config)
            with _lane_log.loading():
                self.backends = [self.native.createBackend(backend, {})]
            for segment in {self.segment(region) for region in regions}:
                memory = [
                    (region.address, region.num_bytes, region.device_id or 0, "")
                    for region in regions
                    if self.segment(region) == segment
                ]
                self.native.registerMem(bindings.nixlRegDList(segment, memory), self.backends)
        except Exception as error:
            raise TransferError(
                f"NIXL cannot start {backend} or register the pool ({error}): try `--transport zmq`"
                + ("" if backend == "UCX" else " or `--nixl-backend UCX`")
            ) from error

    def metadata(self) -> bytes:
        return bytes(self.native.getLocalMD())

    def segment(self, region: Region) -> object:
        """NIXL's kind of memory; a descriptor list has one."""
        return self.bindings.DRAM_SEG if region.device_id is None else self.bindings.VRAM_SEG

    def describe(self, region: Region, ids: BlockIds) -> object:
        """A descriptor list of these blocks alone."""
        size, device_id = np.uint64(region.block_bytes), np.uint64(region.device_id or 0)
        addresses = np.uint64(region.address) + ids.astype(np.uint64) * size
        array = np.stack(
            (addresses, np.full_like(addresses, size), np.full_like(addresses, device_id)), axis=1
        )
        return self.bindings.nixlXferDList(self.segment(region), array)

    def prepare(self, agent_name: str, regions: Sequence[Region], segment: object) -> int:
        """A descriptor list whose indices count the blocks of all regions of this kind in turn."""
        strided = [
            (r.address, r.block_bytes, r.device_id or 0, r.block_bytes, r.num_blocks)
            for r in regions
            if self.segment(r) == segment
        ]
        array = np.array(strided, dtype=np.uint64)
        return int(self.native.prepXferDlist(agent_name, segment, array, self.backends))

    def is_disconnect(self, error: Exception) -> bool:
        return isinstance(error, self.bindings.nixlRemoteDisconnectError)

    def close(self) -> None:
        self.native = None


class _Part:
    """One transfer of a read: unposted, then under way under `handle`, then over."""

    __slots__ = ("handle", "local", "region", "remote")

    def __init__(self, region: int, remote: BlockIds, local: BlockIds) -> None:
        self.region, self.remote, self.local = region, remote, local
        self.handle: int | None = None


class _Read:
    __slots__ = ("active", "error", "peer_lost", "read_id", "unposted")

    def __init__(self, read_id: int, parts: Sequence[_Part]) -> None:
        self.read_id = read_id
        self.unposted = deque(parts)
        self.active: list[_Part] = []
        self.error: str | None = None
        self.peer_lost = False

    @property
    def is_over(self) -> bool:
        return self.peer_lost or not (self.unposted or self.active)

    def stop(self, error: str) -> None:
        """Post nothing more; what is under way goes on until it ends."""
        self.error = self.error or error
        self.unposted.clear()


class NixlConnection:
    def __init__(self, agent: _Agent, memory: RemoteMemory, regions: Sequence[Region]) -> None:
        self._agent = agent
        self._remote_name = _text(agent.native.loadRemoteMD(memory.blob))
        sides = (agent.bindings.NIXL_INIT_AGENT, regions), (self._remote_name, memory.regions)
        is_prepared = max(sum(r.num_blocks for r in side) for _, side in sides) <= MAX_PREPARED
        self._local, self._remote = (_Side(agent, *side, is_prepared=is_prepared) for side in sides)
        self._block_bytes = [region.block_bytes for region in regions]
        self._reads: dict[int, _Read] = {}
        self._next_id = 1

    @property
    def path(self) -> str:
        return " ".join(("nixl", *_lane_log.lanes(self._agent.name)))

    @property
    def waitable(self) -> "zmq.Socket[bytes] | None":
        return None

    def read(self, reads: Sequence[BlockRead]) -> int:
        read = _Read(self._next_id, [part for item in reads for part in self._parts(item)])
        self._next_id += 1
        self._reads[read.read_id] = read
        return read.read_id

    def poll(self) -> list[ReadResult]:
        until_s = time.monotonic() + POLL_BUDGET_S
        for read in self._reads.values():
            self._check(read)
            while read.unposted and time.monotonic() < until_s:
                self._post(read)
        over = [read for read in self._reads.values() if read.is_over]
        for read in over:
            del self._reads[read.read_id]
        return [ReadResult(read.read_id, read.error, read.peer_lost) for read in over]

    def cancel(self, read_id: int) -> bool:
        read = self._reads.get(read_id)
        if read is None:
            return True
        read.stop("cancelled")
        self._check(read)
        if read.active:
            return False
        del self._reads[read_id]
        return True

    def close(self) -> None:
        if self._agent.native is None:
            return
        started_s = time.monotonic()
        self._reads.clear()
        self._agent.close()
        logger.debug("NIXL agent destroyed in %.0f ms", (time.monotonic() - started_s) * 1000)

    def _parts(self, read: BlockRead) -> list[_Part]:
        remote, local = sort_pairs(read.remote_ids, read.local_ids)
        size = max(1, PART_BYTES // self._block_bytes[read.region])
        return [
            _Part(read.region, remote[start : start + size], local[start : start + size])
            for start in range(0, remote.size, size)
        ]

    def _post(self, read: _Read) -> None:
        part = read.unposted.popleft()
        native, bindings = self._agent.native, self._agent.bindings
        try:
            part.handle = self._request(part)
            status = native.postXferReq(part.handle, "")
        except Exception as error:
            self._failed(read, part, error)
            return
        self._note(read, part, status == bindings.NIXL_SUCCESS)

    def _request(self, part: _Part) -> int:
        agent = self._agent
        local, remote = self._local.of(part.region, part.local), self._remote.of(part.region, part.remote)
        if isinstance(local, _Prepared) and isinstance(remote, _Prepared):
            lists = (local.handle, local.indices, remote.handle, remote.indices)
            request = agent.native.makeXferReq(agent.bindings.NIXL_READ, *lists, "", agent.backends, False)
        else:
            request = agent.native.createXferReq(
                agent.bindings.NIXL_READ, local, remote, self._remote_name, "", agent.backends
            )
        return int(request)

    def _check(self, read: _Read) -> None:
        active, read.active = read.active, []
        for part in active:
            try:
                status = self._agent.native.getXferStatus(part.handle)
            except Exception as error:
                self._failed(read, part, error)
                continue
            self._note(read, part, status == self._agent.bindings.NIXL_SUCCESS)

    def _note(self, read: _Read, part: _Part, done: bool) -> None:
        if done:
            self._agent.native.releaseXferReq(part.handle)
        else:
            read.active.append(part)

    def _failed(self, read: _Read, part: _Part, error: Exception) -> None:
        """NIXL reports errors as exceptions; the handle is over then."""
        read.peer_lost |= self._agent.is_disconnect(error)
        read.stop(f"NIXL: {error}")
        if part.handle is not None:
            try:
                self._agent.native.releaseXferReq(part.handle)
            except Exception as release_error:
                logger.debug("a failed transfer could not be released: %s", release_error)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Blocks by their indices in a prepared descriptor list."""

    handle: int
    indices: BlockIds


class _Side:
    """The regions of one end of a connection, prepared, or described anew for each read."""

    def __init__(
        self, agent: _Agent, agent_name: str, regions: Sequence[Region], *, is_prepared: bool
    ) -> None:
        self._agent, self._regions = agent, regions
        self._lists: list[_Prepared] = []
        """Of each region: its list, and where its blocks begin there."""
        if not is_prepared:
            return
        handles: dict[object, int] = {}
        num_before: Counter[object] = Counter()
        for region in regions:
            segment = agent.segment(region)
            if segment not in handles:
                handles[segment] = agent.prepare(agent_name, regions, segment)
            self._lists.append(_Prepared(handles[segment], np.array([num_before[segment]], np.int32)))
            num_before[segment] += region.num_blocks

    def of(self, region: int, ids: BlockIds) -> object:
        """These blocks of the region as NIXL takes them."""
        if not self._lists:
            return self._agent.describe(self._regions[region], ids)
        return _Prepared(self._lists[region].handle, ids + self._lists[region].indices)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
