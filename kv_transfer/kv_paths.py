"""Which pieces of a source's KV go where, when the ranks of either engine share the heads out.

The `kv` regions of an engine, in order, are the pools of its tensor-parallel ranks: the same blocks, each
with the rank's own heads. Engines of equally many ranks read rank by rank. Otherwise `plan_heads` says which
heads come from which rank, and the pieces are these heads of single token rows [keys, values].
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import numpy as np
import numpy.typing as npt

from kv_transfer.errors import LayoutError
from kv_transfer.head_slices import HeadSlice, heads_of, plan_heads
from kv_transfer.layout import BlockIds, Region, RegionKind
from kv_transfer.transport import BlockRead
from kv_transfer.units import Units, units_of


@dataclass(frozen=True, slots=True, eq=False)
class HeadPieces:
    """A run of heads in every token row of a piece; rows are `per_row` smaller pieces of some heads each."""

    num_rows: int
    """In one piece of the units."""
    per_row: int
    chosen: npt.NDArray[np.int32]
    """Places in a row: keys, then values."""

    def cut(self, region: Region) -> Region:
        factor = self.num_rows * self.per_row
        return replace(
            region, block_bytes=region.block_bytes // factor, num_blocks=region.num_blocks * factor
        )

    def pieces(self, ids: BlockIds) -> BlockIds:
        rows = ids.astype(np.int64)[:, None] * self.num_rows + np.arange(self.num_rows)
        return (rows[:, :, None] * self.per_row + self.chosen).reshape(-1).astype(np.int32)


@dataclass(frozen=True, slots=True)
class KvPath:
    """What one of our ranks reads from one rank of the source; None: whole pieces, all their heads."""

    remote_rank: int
    local_rank: int
    remote_heads: HeadPieces | None = None
    local_heads: HeadPieces | None = None


@dataclass(frozen=True, slots=True)
class KvPlan:
    """How blocks are cut, and the regions of a connection: one pair for each path, then all other kinds."""

    units: Units
    paths: tuple[KvPath, ...]
    remote: tuple[Region, ...]
    local: tuple[Region, ...]
    sources: tuple[int, ...]
    """Which registered region of the source each of `remote` is, or is a part of."""

    def index_of(self, kind: RegionKind) -> int:
        """Of a kind other than kv, in `remote` and `local`."""
        for index in range(len(self.paths), len(self.local)):
            if self.local[index].kind == kind:
                return index
        raise LayoutError(f"there is no {kind} region")

    def kv_reads(
        self, remote_ids: BlockIds, local_ids: BlockIds, units: range, first_block: int
    ) -> list[BlockRead]:
        """The reads that bring these units of tokens; `local_ids` begin with block `first_block`."""
        if not units:
            return []
        remote = self.units.remote_pieces(remote_ids, units.start, units.stop)
        local = self.units.local_pieces(local_ids, units.start, units.stop, first_block)
        return [
            BlockRead(
                index,
                remote if path.remote_heads is None else path.remote_heads.pieces(remote),
                local if path.local_heads is None else path.local_heads.pieces(local),
            )
            for index, path in enumerate(self.paths)
        ]


def plan_kv(remote: Sequence[Region], local: Sequence[Region], block_size: int) -> KvPlan | None:
    """None if the blocks do not fit each other; `LayoutError` if the ranks do not.

    `block_size`: tokens in a local block. Regions of other kinds must be alike on both sides.
    """
    theirs, ours = ([r for r in side if r.kind == "kv"] for side in (remote, local))
    if len({(r.block_bytes, r.num_blocks) for r in theirs}) > 1:
        raise LayoutError("the ranks of the source have unequal KV pools")
    if len(theirs) == len(ours):
        units = units_of(theirs[0].block_bytes, ours[0], block_size)
        paths = tuple(KvPath(rank, rank) for rank in range(len(ours)))
    else:
        num_remote, num_local = (len(heads_of(0, len(side), ours[0].num_heads)) for side in (theirs, ours))
        as_ours, rest = divmod(theirs[0].block_bytes * num_local, num_remote)
        units = None if rest else units_of(as_ours, ours[0], block_size)
        if units is not None and units.num_parts == 1:
            units = replace(units, num_parts=ours[0].num_parts)
        paths = () if units is None else _paths(units, len(theirs), len(ours), ours[0].num_heads)
    if units is None:
        return None
    remote_at = [index for index, region in enumerate(remote) if region.kind == "kv"]
    others = [index for index, region in enumerate(remote) if region.kind != "kv"]
    return KvPlan(
        units,
        paths,
        (
            *(_cut(units.cut_remote(theirs[p.remote_rank]), p.remote_heads) for p in paths),
            *(remote[index] for index in others),
        ),
        (
            *(_cut(units.cut_local(ours[p.local_rank]), p.local_heads) for p in paths),
            *(region for region in local if region.kind != "kv"),
        ),
        (*(remote_at[p.remote_rank] for p in paths), *others),
    )


def _paths(units: Units, num_remote: int, num_local: int, num_heads: int) -> tuple[KvPath, ...]:
    remote_width, local_width = (len(heads_of(0, size, num_heads)) for size in (num_remote, num_local))
    width = gcd(remote_width, local_width)
    return tuple(
        _path(units, each, rank, remote_width, local_width, width)
        for rank in range(num_local)
        for each in plan_heads(num_heads, num_remote, num_local, rank)
    )


def _path(
    units: Units, part: HeadSlice, local_rank: int, remote_width: int, local_width: int, width: int
) -> KvPath:
    """`width`: heads in a piece."""
    if part.num_heads == remote_width == local_width:
        return KvPath(part.remote_rank, local_rank)
    remote, local = (
        HeadPieces(units.num_tokens, 2 * per_rank // width, _places(first, part.num_heads, per_rank, width))
        for first, per_rank in ((part.remote_head, remote_width), (part.local_head, local_width))
    )
    return KvPath(part.remote_rank, local_rank, remote, local)


def _places(first_head: int, num_heads: int, per_rank: int, width: int) -> npt.NDArray[np.int32]:
    keys = np.arange(first_head // width, (first_head + num_heads) // width, dtype=np.int32)
    return np.concatenate((keys, keys + np.int32(per_rank // width)))


def _cut(region: Region, heads: HeadPieces | None) -> Region:
    return region if heads is None else heads.cut(region)
