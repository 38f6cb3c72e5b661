"""Changes of the prefix cache, collected for whoever routes requests.

Nobody need listen: when more has changed than is worth telling one by one, the changes are forgotten, and the
next one who asks is told everything that is cached.
"""

from collections.abc import Sequence

from shared_scheduler.radix_tree import Node, RadixTree
from wire.cache import CacheEvent, chained_hashes, root_hash

MAX_PENDING_BLOCKS = 65_536


class CacheEventLog:
    """Names the blocks of a tree's nodes (`Node.hashes`) and remembers what changed since `take`."""

    def __init__(self, tree: RadixTree, block_size: int, max_pending: int = MAX_PENDING_BLOCKS) -> None:
        self._tree = tree
        self._block_size = block_size
        self._max_pending = max_pending
        self._events: list[CacheEvent] = []
        self._num_pending = 0
        self._has_lost = False

    def stored(self, node: Node) -> None:
        """A node was inserted."""
        before = self._hash_before(node)
        node.hashes = chained_hashes(before, node.key, self._block_size)
        self._add(CacheEvent(kind="stored", names=_names(node.hashes), parent=before.hex()))

    def removing(self, leaf: Node, num_blocks: int) -> None:
        """The last blocks of a leaf are about to be removed."""
        at = leaf.num_blocks - num_blocks
        self._add(CacheEvent(kind="removed", names=_names(leaf.hashes[at:])))
        del leaf.hashes[at:]

    def take(self) -> tuple[CacheEvent, ...]:
        """What changed since the last call, in order."""
        events = self._everything() if self._has_lost else tuple(self._events)
        self._events, self._num_pending, self._has_lost = [], 0, False
        return events

    def check_invariants(self) -> None:
        for node in self._tree.nodes():
            expected = chained_hashes(self._hash_before(node), node.key, self._block_size)
            assert node.hashes == expected, f"{node!r} has other hashes than its tokens"

    def _everything(self) -> tuple[CacheEvent, ...]:
        stored = [
            CacheEvent(kind="stored", names=_names(node.hashes), parent=self._hash_before(node).hex())
            for node in self._tree.nodes()
        ]
        return (CacheEvent(kind="cleared"), *stored)

    def _hash_before(self, node: Node) -> bytes:
        above = node.parent
        assert above is not None
        return above.hashes[-1] if above.hashes else root_hash(node.salt)

    def _add(self, event: CacheEvent) -> None:
        if self._has_lost:
            return
        self._events.append(event)
        self._num_pending += len(event.names)
        if self._num_pending > self._max_pending:
            self._events, self._has_lost = [], True


def _names(hashes: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(each.hex() for each in hashes)
