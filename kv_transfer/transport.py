"""The interface every transport stands behind: who may read what, and when a destination is safe.

A source registers its regions and hands the returned blob to its peers; a sink registers its own regions and
opens one `Connection` per source process. Only the pump thread of the owning `HandoverSource` or
`HandoverSink` calls these objects.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import zmq

from kv_transfer.layout import BlockIds, Region


@dataclass(frozen=True, slots=True)
class RemoteMemory:
    """A source's registered memory as its hello describes it; `host_address` is its control endpoint."""

    blob: bytes
    regions: tuple[Region, ...]
    host_address: str
    sources: tuple[int, ...] | None = None
    """Which registered region each of `regions` is, or is cut from; None: they are the registered ones."""

    def source_of(self, region: int) -> int:
        return region if self.sources is None else self.sources[region]


@dataclass(frozen=True, slots=True)
class BlockRead:
    """Copy block `remote_ids[i]` of the peer's region `region` into block `local_ids[i]` of ours."""

    region: int
    """Index in the region lists that the connection was opened with."""
    remote_ids: BlockIds
    local_ids: BlockIds

    def __post_init__(self) -> None:
        assert self.remote_ids.shape == self.local_ids.shape


@dataclass(frozen=True, slots=True)
class ReadResult:
    """A read that is over: nothing of it can be written any more. `error` is None if all of it arrived."""

    read_id: int
    error: str | None = None
    peer_lost: bool = False


class Connection(Protocol):
    """Reads from one source process. Block ids were checked against both sides' regions by the caller."""

    @property
    def path(self) -> str:
        """How the bytes move, as far as is known, such as `nixl cma/memory tcp/lo`."""

    @property
    def waitable(self) -> "zmq.Socket[bytes] | None":
        """A socket that is readable when `poll` has work; None: poll every 0.1 ms while a read runs."""

    def read(self, reads: Sequence[BlockRead]) -> int:
        """Start a read and return its id, unique in this connection. `ReadError` if it cannot start."""

    def poll(self) -> list[ReadResult]:
        """Make progress for a bounded time; report each read once, when it is over."""

    def cancel(self, read_id: int) -> bool:
        """Give a read up. True: its destination is safe at once. False: `poll` reports when it is."""

    def close(self) -> None:
        """Fence: when this returns, no read of this connection can write to the destination."""


class Transport(Protocol):
    """One way to move blocks; one object serves one source or one sink."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str:
        """Of the library underneath; shown in the hello and in the self-test line."""

    def register(self, regions: Sequence[Region], serve_at: str | None) -> bytes:
        """Make `regions` known, once. With `serve_at` (a control endpoint) peers may read them through
        the returned blob. `BindError`, `TransportUnavailable`."""

    def connect(self, memory: RemoteMemory, regions: Sequence[Region] | None = None) -> Connection:
        """Open a connection to a source; must not block for long. `ReadError`, `PeerLost`.

        `regions`: the registered memory as this connection's blocks, of the sizes of `memory.regions`; None:
        as it was registered.
        """

    def close(self) -> None:
        """Stop serving. Connections are closed by whoever opened them."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Block id pairs merged where both sides are consecutive: `lengths[i]` blocks from each start."""

    remote_starts: BlockIds
    local_starts: BlockIds
    lengths: BlockIds


def sort_pairs(remote_ids: BlockIds, local_ids: BlockIds) -> tuple[BlockIds, BlockIds]:
    """Both lists in the order of the remote ids, so that neighbours can be merged."""
    if remote_ids.size < 2 or bool(np.all(np.diff(remote_ids) > 0)):
        return remote_ids, local_ids
    order = np.argsort(remote_ids, kind="stable")
    return remote_ids[order], local_ids[order]


def merge_runs(remote_ids: BlockIds, local_ids: BlockIds) -> Runs:
    remote, local = sort_pairs(remote_ids, local_ids)
    if remote.size == 0:
        return Runs(remote, local, np.zeros(0, dtype=np.int32))
    breaks = np.flatnonzero((np.diff(remote) != 1) | (np.diff(local) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((starts, [remote.size]))).astype(np.int32)
    return Runs(remote[starts], local[starts], lengths)
