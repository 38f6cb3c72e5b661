"""How the ZMQ transport cuts a read into messages of about 1 MiB."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.transport import BlockRead, merge_runs

PIECE_BYTES = 1 << 20

STAGED_BELOW_BYTES = 256 << 10
"""Extents shorter than this travel together, gathered at the source and scattered at the reader."""

MAX_PIECE_BYTES = PIECE_BYTES + STAGED_BELOW_BYTES

MAX_EXTENTS = 2048
"""In one piece."""

Extents = npt.NDArray[np.int64]
"""`[n, 2]`: byte offset in the region, number of bytes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One message: the bytes of `remote` in the peer's region, in order, go to `local` in ours."""

    region: int
    remote: Extents
    local: Extents
    num_bytes: int


def cut(reads: Sequence[BlockRead], block_bytes: Sequence[int]) -> list[Piece]:
    """`block_bytes[i]` is the block size of region i on both sides."""
    return [piece for read in reads for piece in _cut_one(read, block_bytes[read.region])]


def _cut_one(read: BlockRead, block_bytes: int) -> Iterator[Piece]:
    runs = merge_runs(read.remote_ids, read.local_ids)
    extents = np.stack((runs.remote_starts, runs.local_starts, runs.lengths), axis=1) * np.int64(block_bytes)
    is_small = extents[:, 2] < STAGED_BELOW_BYTES
    for remote, local, length in extents[~is_small]:
        yield from _split(read.region, int(remote), int(local), int(length))
    yield from _gather(read.region, extents[is_small])


def _split(region: int, remote: int, local: int, length: int) -> Iterator[Piece]:
    """One contiguous extent in equal messages of at most PIECE_BYTES."""
    num_pieces = -(-length // PIECE_BYTES)
    step = -(-length // num_pieces)
    for start in range(0, length, step):
        size = min(step, length - start)
        yield Piece(
            region,
            np.array([[remote + start, size]], dtype=np.int64),
            np.array([[local + start, size]], dtype=np.int64),
            size,
        )


def _gather(region: int, extents: npt.NDArray[np.int64]) -> Iterator[Piece]:
    """Many short extents in messages of about PIECE_BYTES."""
    if not extents.size:
        return
    ends = np.cumsum(extents[:, 2])
    groups = np.maximum((ends - extents[:, 2]) // PIECE_BYTES, np.arange(len(extents)) // MAX_EXTENTS)
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    for part in np.split(extents, starts[1:]):
        yield Piece(region, part[:, [0, 2]].copy(), part[:, [1, 2]].copy(), int(part[:, 2].sum()))
