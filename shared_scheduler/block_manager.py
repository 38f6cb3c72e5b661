"""A pool of equal pieces (KV blocks, or state slots) with reference counts and an O(1) free list.

A cache may own pieces besides those who use them: such a piece keeps what was written into it when its last
user lets go. It counts as free, because it is given up as soon as an allocation needs it.
"""

from collections.abc import Callable
from enum import Enum

import numpy as np
import numpy.typing as npt

from shared_scheduler.errors import ConfigError, CorruptionError

BlockIds = npt.NDArray[np.int32]


class AllocStatus(Enum):
    """Answer to "can this be taken?": now, once others have finished, or not in this pool."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class BlockManager:
    """Owns block ids 1..num_blocks-1; 0 is the null block and is never handed out.

    The free list is a ring: blocks are taken from its head, and a block whose count drops to zero joins
    its tail, so the longest-free block is reused first. Not thread-safe.
    """

    def __init__(self, num_blocks: int, name: str = "block") -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"a {name} pool needs at least 2 entries (0 is the null {name}), got {num_blocks}"
            )
        self._name = name
        self._num_blocks = num_blocks
        self._evict: Callable[[int], None] | None = None
        self._fill()

    def _fill(self) -> None:
        num_blocks = self._num_blocks
        self._ring = np.arange(1, num_blocks, dtype=np.int32)
        self._head = 0
        self._num_empty = num_blocks - 1
        self._counts = np.zeros(num_blocks, np.int32)
        self._marks = np.zeros(num_blocks, np.int32)
        self._order = np.arange(num_blocks, dtype=np.int32)
        self._is_cached = np.zeros(num_blocks, np.bool_)
        self.num_shared = 0
        """Blocks with more than one user that are not cached: whoever writes into one needs a copy first."""
        self.num_cached = 0
        """Blocks that the cache owns, in use or not."""
        self.num_evictable = 0
        """Of these, those that nobody uses."""

    @property
    def num_free(self) -> int:
        """Blocks that can be had at once: empty ones, and cached ones that nobody uses."""
        return self._num_empty + self.num_evictable

    @property
    def num_empty(self) -> int:
        """Blocks in the free list, of no owner at all."""
        return self._num_empty

    @property
    def num_usable(self) -> int:
        return self._num_blocks - 1

    def usage(self, num_planned: int = 0) -> float:
        """Share of the pool that is taken: (total - free + planned) / total, the null block in the total."""
        return (self._num_blocks - self.num_free + num_planned) / self._num_blocks

    def count(self, block_id: int) -> int:
        """How many users the block has, the cache not among them."""
        return int(self._counts[block_id])

    def is_private(self, block_id: int) -> bool:
        """May the block's user write into it: has it neither another user nor the cache as an owner?"""
        return self._counts[block_id] == 1 and not self._is_cached[block_id]

    def has_other_owners(self, block_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Per block: does it have more than one user?"""
        mask: npt.NDArray[np.bool_] = self._counts.take(block_ids) > 1
        return mask

    def num_sole(self, block_ids: npt.NDArray[np.integer]) -> int:
        """How many of the blocks have a single user: they are free once it lets go."""
        return int(np.count_nonzero(self._counts.take(block_ids) == 1))

    def max_count(self, block_ids: npt.NDArray[np.integer]) -> int:
        return int(self._counts.take(block_ids).max())

    def num_unused(self, block_ids: npt.NDArray[np.integer]) -> int:
        """How many of the blocks nobody uses."""
        return int(np.count_nonzero(self._counts.take(block_ids) == 0))

    def any_cached(self, block_ids: npt.NDArray[np.integer]) -> bool:
        """Is one of the blocks the cache's, so that nobody may write into it?"""
        return self.num_cached > 0 and bool(self._is_cached.take(block_ids).any())

    def can_allocate(self, num_blocks: int) -> AllocStatus:
        if num_blocks >= self._num_blocks:
            return AllocStatus.NEVER
        return AllocStatus.OK if num_blocks <= self.num_free else AllocStatus.LATER

    def allocate(self, num_blocks: int) -> BlockIds:
        """Take blocks; ask `can_allocate` first. Returns int32[num_blocks]."""
        if num_blocks > self._num_empty and self._evict is not None:
            self._evict(num_blocks - self._num_empty)
        if num_blocks > self._num_empty:
            raise CorruptionError(f"{num_blocks} {self._name}s taken with {self._num_empty} free")
        ids = self._ring_slice(self._head, num_blocks)
        self._head = (self._head + num_blocks) % self._ring.size
        self._num_empty -= num_blocks
        self._counts[ids] = 1
        return ids

    def allocate_one(self) -> int:
        return int(self.allocate(1)[0])

    def pin(self, block_ids: npt.ArrayLike) -> None:
        """Add one user to blocks that are held or cached."""
        ids = self._checked(block_ids)
        if not ids.size:
            return
        counts = self._counts[ids]
        is_cached = self._is_cached[ids]
        if counts.min() < 1:
            unowned = (counts == 0) & ~is_cached
            if unowned.any():
                raise CorruptionError(f"{self._name} {int(ids[unowned][0])} pinned while it is free")
            self.num_evictable -= int(np.count_nonzero(counts == 0))
        self.num_shared += int(np.count_nonzero((counts == 1) & ~is_cached))
        self._counts[ids] = counts + 1

    def free(self, block_ids: npt.ArrayLike) -> None:
        """Drop one user of each block.

        Those without any go to the tail of the free list, in this order, but for cached ones.
        """
        ids = self._checked(block_ids)
        if not ids.size:
            return
        counts = self._counts[ids] - 1
        if counts.min() < 0:
            raise CorruptionError(f"{self._name} {int(ids[counts.argmin()])} freed while it is free")
        self._counts[ids] = counts
        unused = ids[counts == 0]
        if not self.num_cached:
            self.num_shared -= int(np.count_nonzero(counts == 1))
            self._put_back(unused)
            return
        self.num_shared -= int(np.count_nonzero((counts == 1) & ~self._is_cached[ids]))
        is_cached = self._is_cached[unused]
        self.num_evictable += int(np.count_nonzero(is_cached))
        self._put_back(unused[~is_cached])

    # ----- the cache

    def serve_cache(self, evict: Callable[[int], None]) -> None:
        """`evict(n)` makes the cache `disown` n blocks that nobody uses; called when too few are empty."""
        self._evict = evict

    def own(self, block_ids: npt.ArrayLike) -> None:
        """The cache becomes an owner of blocks in use; they are not written any more."""
        ids = self._checked(block_ids)
        if not ids.size:
            return
        counts = self._counts[ids]
        if counts.min() < 1 or self._is_cached[ids].any():
            raise CorruptionError(f"{self._name}s {ids.tolist()} cached while free or cached")
        self.num_shared -= int(np.count_nonzero(counts > 1))
        self.num_cached += ids.size
        self._is_cached[ids] = True

    def disown(self, block_ids: npt.ArrayLike) -> None:
        """The cache gives up blocks: those that nobody uses join the tail of the free list."""
        ids = self._checked(block_ids)
        if not self._is_cached[ids].all():
            raise CorruptionError(f"{self._name}s {ids.tolist()} evicted while not cached")
        self._is_cached[ids] = False
        self.num_cached -= ids.size
        counts = self._counts[ids]
        self.num_shared += int(np.count_nonzero(counts > 1))
        unused = ids[counts == 0]
        self.num_evictable -= unused.size
        self._put_back(unused)

    def reset(self) -> None:
        """Forget the order of reuse; refused while anything is held or cached."""
        if self._num_empty != self.num_usable:
            raise CorruptionError(f"{self.num_usable - self._num_empty} {self._name}s are held at reset")
        self._fill()

    def counts(self) -> npt.NDArray[np.int32]:
        """Users of every block, int32[num_blocks]; a copy."""
        return self._counts.copy()

    def cached(self) -> npt.NDArray[np.bool_]:
        """Is it the cache's, for every block; a copy."""
        return self._is_cached.copy()

    def check_invariants(self) -> None:
        """Empty + cached + held = usable, nothing twice, and the running counts are right."""
        empty = self._ring_slice(self._head, self._num_empty)
        assert np.unique(empty).size == empty.size, f"a {self._name} is in the free list twice"
        assert not self._counts[empty].any(), f"a free {self._name} has an owner"
        assert not self._is_cached[empty].any(), f"a free {self._name} is cached"
        assert self._counts[0] == 0, f"the null {self._name} has an owner"
        num_owned = int(np.count_nonzero((self._counts > 0) | self._is_cached))
        assert num_owned + self._num_empty == self.num_usable, (num_owned, self._num_empty, self.num_usable)
        assert self.num_shared == int(np.count_nonzero((self._counts > 1) & ~self._is_cached))
        assert self.num_cached == int(np.count_nonzero(self._is_cached))
        assert self.num_evictable == int(np.count_nonzero(self._is_cached & (self._counts == 0)))

    def _put_back(self, ids: npt.NDArray[np.intp]) -> None:
        start = (self._head + self._num_empty) % self._ring.size
        fits = min(ids.size, self._ring.size - start)
        self._ring[start : start + fits] = ids[:fits]
        self._ring[: ids.size - fits] = ids[fits:]
        self._num_empty += ids.size

    def _ring_slice(self, start: int, length: int) -> BlockIds:
        """A copy of `length` entries of the ring from `start` on."""
        end = start + length
        if end <= self._ring.size:
            return self._ring[start:end].copy()
        return np.concatenate([self._ring[start:], self._ring[: end - self._ring.size]])

    def _checked(self, block_ids: npt.ArrayLike) -> npt.NDArray[np.intp]:
        """The ids as indices, each in range and named once."""
        ids = np.asarray(block_ids, np.intp)
        if not ids.size:
            return ids
        if ids.min() < 1 or ids.max() >= self._num_blocks:
            raise CorruptionError(f"{self._name} ids {ids.min()}..{ids.max()} outside 1..{self.num_usable}")
        order = self._order[: ids.size]
        self._marks[ids] = order
        if ids.size > self._num_blocks or (self._marks[ids] != order).any():
            raise CorruptionError(f"a {self._name} is named twice in one list: {ids.tolist()}")
        return ids
