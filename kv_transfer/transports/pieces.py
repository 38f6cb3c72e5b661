"""How the ZMQ transport cuts a read into messages of about 1 MiB."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.transport import BlockRead, merge_runs

PIECE_BYTES = 1 << 20

MAX_EXTENT_BYTES = PIECE_BYTES * 3 // 2
"""Longer extents are split; a block of 1.4 MiB is one."""

STAGED_BELOW_BYTES = 256 << 10
"""Shorter extents share a frame, gathered at the source and scattered at the reader; others have one each."""

MAX_STAGED_BYTES = PIECE_BYTES + STAGED_BELOW_BYTES

MAX_PIECE_BYTES = PIECE_BYTES + MAX_EXTENT_BYTES

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


def is_staged(extents: Extents) -> bool:
    """Both sides tell from the extents how the answer is framed."""
    return len(extents) > 1 and int(extents[:, 1].min()) < STAGED_BELOW_BYTES


def cut(reads: Sequence[BlockRead], block_bytes: Sequence[int]) -> list[Piece]:
    """`block_bytes[i]` is the block size of region i on both sides."""
    return [piece for read in reads for piece in _cut_one(read, block_bytes[read.region])]


def _cut_one(read: BlockRead, block_bytes: int) -> Iterator[Piece]:
    runs = merge_runs(read.remote_ids, read.local_ids)
    spans = np.stack((runs.remote_starts, runs.local_starts, runs.lengths), axis=1) * np.int64(block_bytes)
    is_small = spans[:, 2] < STAGED_BELOW_BYTES
    yield from _group(read.region, _split(spans[~is_small]))
    yield from _group(read.region, spans[is_small])


def _split(spans: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`[n, 3]` spans (remote, local, length), cut into equal ones of at most MAX_EXTENT_BYTES."""
    parts = [
        (remote + start, local + start, min(step, length - start))
        for remote, local, length in spans.tolist()
        for step in (-(-length // max(1, round(length / PIECE_BYTES))),)
        for start in range(0, length, step)
    ]
    return np.array(parts, dtype=np.int64).reshape(-1, 3)


def _group(region: int, spans: npt.NDArray[np.int64]) -> Iterator[Piece]:
    """Messages of about PIECE_BYTES."""
    if not spans.size:
        return
    ends = np.cumsum(spans[:, 2])
    groups = np.stack(((ends - spans[:, 2]) // PIECE_BYTES, np.arange(len(spans)) // MAX_EXTENTS))
    starts = np.flatnonzero(np.diff(groups, prepend=-1).any(axis=0))
    for part in np.split(spans, starts[1:]):
        yield Piece(region, part[:, [0, 2]].copy(), part[:, [1, 2]].copy(), int(part[:, 2].sum()))
