"""A pool of equal pieces (KV blocks, or state slots) with reference counts and an O(1) free list."""

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
        self._fill()

    def _fill(self) -> None:
        num_blocks = self._num_blocks
        self._ring = np.arange(1, num_blocks, dtype=np.int32)
        self._head = 0
        self._num_free = num_blocks - 1
        self._counts = np.zeros(num_blocks, np.int32)
        self._marks = np.zeros(num_blocks, np.int32)
        self._order = np.arange(num_blocks, dtype=np.int32)
        self.num_shared = 0
        """Blocks with more than one owner."""

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_usable(self) -> int:
        return self._num_blocks - 1

    def usage(self, num_planned: int = 0) -> float:
        """Share of the pool that is taken: (total - free + planned) / total, the null block in the total."""
        return (self._num_blocks - self._num_free + num_planned) / self._num_blocks

    def count(self, block_id: int) -> int:
        """How many owners the block has."""
        return int(self._counts[block_id])

    def has_other_owners(self, block_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Per block: does it have more than one owner?"""
        mask: npt.NDArray[np.bool_] = self._counts.take(block_ids) > 1
        return mask

    def num_sole(self, block_ids: npt.NDArray[np.integer]) -> int:
        """How many of the blocks have a single owner."""
        return int(np.count_nonzero(self._counts.take(block_ids) == 1))

    def max_count(self, block_ids: npt.NDArray[np.integer]) -> int:
        return int(self._counts.take(block_ids).max())

    def can_allocate(self, num_blocks: int) -> AllocStatus:
        if num_blocks >= self._num_blocks:
            return AllocStatus.NEVER
        return AllocStatus.OK if num_blocks <= self._num_free else AllocStatus.LATER

    def allocate(self, num_blocks: int) -> BlockIds:
        """Take blocks; ask `can_allocate` first. Returns int32[num_blocks]."""
        if num_blocks > self._num_free:
            raise CorruptionError(f"{num_blocks} {self._name}s taken with {self._num_free} free")
        ids = self._ring_slice(self._head, num_blocks)
        self._head = (self._head + num_blocks) % self._ring.size
        self._num_free -= num_blocks
        self._counts[ids] = 1
        return ids

    def allocate_one(self) -> int:
        return int(self.allocate(1)[0])

    def pin(self, block_ids: npt.ArrayLike) -> None:
        """Add one owner to held blocks."""
        ids = self._checked(block_ids)
        counts = self._counts[ids]
        if ids.size and counts.min() < 1:
            raise CorruptionError(f"{self._name} {int(ids[counts.argmin()])} pinned while it is free")
        self.num_shared += int(np.count_nonzero(counts == 1))
        self._counts[ids] = counts + 1

    def free(self, block_ids: npt.ArrayLike) -> None:
        """Drop one owner of each block; those without any go to the tail of the free list, in this order."""
        ids = self._checked(block_ids)
        if not ids.size:
            return
        counts = self._counts[ids] - 1
        if counts.min() < 0:
            raise CorruptionError(f"{self._name} {int(ids[counts.argmin()])} freed while it is free")
        self._counts[ids] = counts
        self.num_shared -= int(np.count_nonzero(counts == 1))
        self._put_back(ids[counts == 0])

    def reset(self) -> None:
        """Forget the order of reuse; refused while anything is held."""
        if self._num_free != self.num_usable:
            raise CorruptionError(f"{self.num_usable - self._num_free} {self._name}s are held at reset")
        self._fill()

    def counts(self) -> npt.NDArray[np.int32]:
        """Owners of every block, int32[num_blocks]; a copy."""
        return self._counts.copy()

    def check_invariants(self) -> None:
        """Free + held = usable, no block both free and held, `num_shared` right."""
        free = self._ring_slice(self._head, self._num_free)
        assert np.unique(free).size == free.size, f"a {self._name} is in the free list twice"
        assert not self._counts[free].any(), f"a free {self._name} has an owner"
        assert self._counts[0] == 0, f"the null {self._name} has an owner"
        num_held = int(np.count_nonzero(self._counts > 0))
        assert num_held + self._num_free == self.num_usable, (num_held, self._num_free, self.num_usable)
        assert self.num_shared == int(np.count_nonzero(self._counts > 1))

    def _put_back(self, ids: npt.NDArray[np.intp]) -> None:
        start = (self._head + self._num_free) % self._ring.size
        fits = min(ids.size, self._ring.size - start)
        self._ring[start : start + fits] = ids[:fits]
        self._ring[: ids.size - fits] = ids[fits:]
        self._num_free += ids.size

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
