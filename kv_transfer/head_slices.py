"""Which heads a rank of one tensor-parallel engine reads from which ranks of another: pure arithmetic.

Rank r of `size` ranks holds the KV heads r * H // size and on, `H // size` of them, or a single one that it
shares with other ranks where there are more ranks than heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kv_transfer.errors import LayoutError


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """`num_heads` heads that lie together on both sides, by their places in each rank's own blocks."""

    remote_rank: int
    remote_head: int
    local_head: int
    num_heads: int


@dataclass(frozen=True, slots=True)
class ByteSlice:
    """The same as bytes of one token row [key heads, value heads] of each side."""

    remote_rank: int
    remote_offset: int
    local_offset: int
    num_bytes: int


def heads_of(rank: int, size: int, num_kv_heads: int) -> range:
    """The KV heads of one rank; `LayoutError` unless heads and ranks divide each other."""
    if not 0 <= rank < size:
        raise LayoutError(f"rank {rank} is none of {size} ranks")
    if num_kv_heads % size and size % num_kv_heads:
        raise LayoutError(f"{num_kv_heads} KV heads cannot be shared out to {size} ranks")
    first = rank * num_kv_heads // size
    return range(first, first + max(1, num_kv_heads // size))


def plan_heads(num_kv_heads: int, remote_size: int, local_size: int, local_rank: int) -> list[HeadSlice]:
    """Every head of rank `local_rank` exactly once, in order.

    Where several remote ranks hold a head, readers are spread over them.
    """
    return list(
        _slices(num_kv_heads, remote_size, heads_of(local_rank, local_size, num_kv_heads), local_rank)
    )


def plan_bytes(slices: list[HeadSlice], head_bytes: int, num_remote: int, num_local: int) -> list[ByteSlice]:
    """Keys, then values; `num_remote` and `num_local` are the heads that a rank of each side holds."""
    return [
        ByteSlice(
            each.remote_rank,
            (half * num_remote + each.remote_head) * head_bytes,
            (half * num_local + each.local_head) * head_bytes,
            each.num_heads * head_bytes,
        )
        for half in (0, 1)
        for each in slices
    ]


def _slices(num_kv_heads: int, remote_size: int, wanted: range, local_rank: int) -> Iterator[HeadSlice]:
    copies = max(1, remote_size // num_kv_heads)
    per_rank = max(1, num_kv_heads // remote_size)
    heads_of(0, remote_size, num_kv_heads)  # refuses what cannot be shared out
    head = wanted.start
    while head < wanted.stop:
        first_rank = head // per_rank * copies
        start = head % per_rank
        count = min(per_rank - start, wanted.stop - head)
        yield HeadSlice(first_rank + local_rank % copies, start, head - wanted.start, count)
        head += count
