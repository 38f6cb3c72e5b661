"""Computed blocks that outlive their sequences, found again by the tokens they were computed from.

1. `insert`   full blocks that are really written become the cache's: after every chunk, and when a sequence
              lets go of its blocks
2. `match`    finds the longest cached prefix of a prompt
3. `pin`      a sequence, a transfer or a loan uses the prefix; it stays as long as anyone does
4. `evict`    an allocation needs blocks: the least recently used ones that nobody pins go, leaves first

Whoever uses a cached block uses all blocks before it in the tree as well, and `insert` keeps it so. Hence the
blocks of a path are in use up to some point and evictable behind it: what nobody uses can always be had.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from shared_scheduler.block_manager import BlockManager
from shared_scheduler.cache_events import CacheEventLog
from shared_scheduler.radix_tree import NO_BLOCKS, TOKEN_BYTES, Node, Place, RadixTree
from shared_scheduler.rows import Int32Array
from shared_scheduler.snapshots import Snapshots


@dataclass(frozen=True, slots=True)
class Hit:
    """A cached prefix; valid until `PrefixCache.version` changes, and once pinned until it is freed."""

    block_ids: Int32Array
    place: Place | None = None
    state_slot: int = 0
    """Where the state at its end is kept, for models that have one."""

    @property
    def num_blocks(self) -> int:
        return int(self.block_ids.size)


NO_HIT = Hit(NO_BLOCKS)


class PrefixCache:
    """The cached blocks of one pool. Keys are those of `radix_tree`."""

    def __init__(
        self,
        blocks: BlockManager,
        block_size: int,
        states: BlockManager | None = None,
        *,
        has_events: bool = False,
    ) -> None:
        """`states`: the slots of a model that keeps a state beside its blocks."""
        self.tree = RadixTree(block_size)
        self.events = CacheEventLog(self.tree, block_size) if has_events else None
        self._block_bytes = block_size * TOKEN_BYTES
        self.num_evicted = 0
        """Blocks evicted so far."""
        self.version = 0
        """Changes whenever a match may."""
        self._blocks = blocks
        self.snapshots = None if states is None else Snapshots(states)
        self._tick = 0
        self._queue: list[tuple[int, int, Node]] = []
        """Heap of leaves by (last use, entry); an entry's use may be out of date."""
        self._parked: dict[Node, None] = {}
        """Leaves that were all in use when their turn came."""
        self._num_queued = 0
        blocks.serve_cache(self.evict)

    @property
    def num_blocks(self) -> int:
        return self.tree.num_blocks

    def match(self, key: bytes, salt: str) -> Hit:
        """The longest cached prefix; changes nothing, not even the order of eviction."""
        place = self.tree.match(key, salt)
        return NO_HIT if place is None else Hit(place.block_ids(), place)

    def match_with_state(self, key: bytes, salt: str) -> Hit:
        """The longest cached prefix whose state is kept."""
        assert self.snapshots is not None
        place = self.snapshots.deepest(self.tree.match(key, salt))
        return NO_HIT if place is None else Hit(place.block_ids(), place, place.node.state_slot)

    def keep_state(self, key: bytes, salt: str) -> int | None:
        """A slot into which the state at the end of a cached key is to be copied; None: it is kept, or
        there is no slot for it."""
        place, snapshots = self.tree.match(key, salt), self.snapshots
        if snapshots is None or place is None or place.num_blocks * self._block_bytes != len(key):
            return None
        slot = snapshots.keep(self.tree.end_at(place))
        self.version += 1
        return slot

    def pin(self, hit: Hit) -> None:
        """Use a prefix that was just matched; `BlockManager.free` ends the use."""
        if hit.place is not None:
            self._blocks.pin(hit.block_ids)
            self._touch(hit.place.node)

    def touch(self, key: bytes, salt: str) -> None:
        """The prefix counts as just used."""
        place = self.tree.match(key, salt)
        if place is not None:
            self._touch(place.node)

    def insert(self, key: bytes, salt: str, block_ids: Int32Array, *, may_swap: bool) -> Int32Array:
        """Own the written blocks of a key; returns the blocks its user is to use from now on.

        Where the tree has other blocks for the same tokens these are kept. With `may_swap` the user is moved
        over to them: they are pinned for it here, and it must free those that it got replaced. Without, it
        keeps its own, which stay uncached; then only a user who is about to let go may call this.
        """
        place = self.tree.match(key, salt)
        num_known = 0 if place is None else place.num_blocks
        rest = block_ids[num_known:]
        if place is not None:
            known = place.block_ids()
            differs = known != block_ids[:num_known]
            if differs.any():
                # Blocks of a fork's family stay what they are: some other member would not be moved along.
                is_own = self._blocks.max_count(block_ids[int(differs.argmax()) :]) == 1
                if not is_own:
                    self._touch(place.node)
                    return block_ids
                if may_swap:
                    self._blocks.pin(known[differs])
                    block_ids = np.concatenate([known, rest])
        if not rest.size:
            assert place is not None, "an empty key"
            self._touch(place.node)
            return block_ids
        self._blocks.own(rest)
        self.version += 1
        node = self.tree.insert(key, salt, place, rest)
        self._touch(node)
        if self.events is not None:
            self.events.stored(node)
        return block_ids

    def evict(self, num_blocks: int) -> None:
        """Give up so many unused blocks, or all there are."""
        while num_blocks > 0:
            leaf = self._oldest_leaf()
            if leaf is None:
                return
            tail = leaf.blocks[-num_blocks:]
            num_unused = self._blocks.num_unused(tail)
            if not num_unused:
                self._parked[leaf] = None
                continue
            self._blocks.disown(tail[tail.size - num_unused :])
            self.num_evicted += num_unused
            self.version += 1
            num_blocks -= num_unused
            if self.events is not None:
                self.events.removing(leaf, num_unused)
            if self.snapshots is not None:
                self.snapshots.drop(leaf)
            self._enqueue(self.tree.trim(leaf, num_unused))

    def check_invariants(self) -> None:
        """The tree's blocks are those of the pool, used up to a point on every path, evictable behind it."""
        self.tree.check_invariants()
        if self.events is not None:
            self.events.check_invariants()
        if self.snapshots is not None:
            self.snapshots.check_invariants()
        counts, is_cached = self._blocks.counts(), self._blocks.cached()
        in_tree = [node.blocks for node in self.tree.nodes()]
        block_ids = np.concatenate(in_tree) if in_tree else NO_BLOCKS
        assert np.unique(block_ids).size == block_ids.size, "a block is in the tree twice"
        assert np.array_equal(np.flatnonzero(is_cached), np.sort(block_ids)), (
            "the pool's cached blocks differ"
        )
        queued = {id(node) for _, _, node in self._queue}
        for node in self.tree.nodes():
            above = node.parent.blocks if node.parent is not None else NO_BLOCKS
            uses = counts[np.concatenate([above[-1:], node.blocks])]
            assert (uses[1:] <= uses[:-1]).all(), f"{node!r} is used without what is before it: {uses}"
            assert node.is_queued == (id(node) in queued)
            if not node.children and uses[-1] == 0:
                assert node.is_queued or node in self._parked, f"{node!r} would not be found for eviction"
            assert node.parent is not None
            assert not node.parent.key or node.parent.last_used >= node.last_used

    # ----- the order of eviction

    def _touch(self, node: Node) -> None:
        self._tick += 1
        for above in _path(node):
            above.last_used = self._tick
            if self.snapshots is not None:
                self.snapshots.touch(above)
        self._enqueue(node)

    def _enqueue(self, node: Node) -> None:
        if node.children or node.is_queued or node.parent is None:
            return
        self._parked.pop(node, None)
        self._num_queued += 1
        node.is_queued = True
        heappush(self._queue, (node.last_used, self._num_queued, node))

    def _oldest_leaf(self) -> Node | None:
        """The least recently used leaf, taken out of the queue; None: nothing can be evicted."""
        while True:
            if not self._queue and not self._unpark():
                return None
            stamp, _, leaf = heappop(self._queue)
            leaf.is_queued = False
            if stamp != leaf.last_used:
                self._enqueue(leaf)
            elif not leaf.children and leaf.parent is not None:
                return leaf

    def _unpark(self) -> bool:
        """Queue the parked leaves whose users have let go; False: there are none."""
        parked, self._parked = self._parked, {}
        for leaf in parked:
            if self._blocks.num_unused(leaf.blocks[-1:]):
                self._enqueue(leaf)
            elif leaf.parent is not None and not leaf.children:
                self._parked[leaf] = None
        return bool(self._queue)


def _path(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent
