"""A radix tree over full blocks: which prefixes are known, and where their blocks are.

A key is the token ids of whole blocks as bytes (`key_of`), so comparing a run of blocks is one memory
comparison. A node is a run of blocks that always follow one another; where two keys part, a node is split.
Each cache salt has a root of its own: keys with different salts never meet.

A `Watch` follows how much of one key is in the tree, without ever looking it up again:
1. `watch(key, salt, on_change)` looks the key up once; `watch.num_blocks` is the length of the match.
2. The watch is registered where its match ends. When that place is extended by the block the key goes on
   with, the watch moves down and grows; when blocks before it are removed, it moves up and shrinks. Both call
   `on_change(watch)`, at once; the callee must not change the tree. A split alone changes no length.
3. `unwatch` ends it.
The work for an insertion or a removal is proportional to the number of watches whose length it changes.

Nothing here knows which blocks are in use: `prefix_cache` does.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from shared_scheduler.rows import Int32Array

TOKEN_BYTES = 4
NO_BLOCKS: Int32Array = np.empty(0, np.int32)


def key_of(token_ids: Int32Array, num_blocks: int, block_size: int) -> bytes:
    """The key of the first `num_blocks` full blocks."""
    return token_ids[: num_blocks * block_size].tobytes()


class Node:
    """A run of blocks. Read its fields, change nothing: the tree does."""

    __slots__ = (
        "blocks", "children", "hashes", "is_queued", "key", "last_used", "parent", "salt", "state_slot",
        "watches",
    )  # fmt: skip

    def __init__(self, parent: "Node | None", key: bytes, blocks: Int32Array, salt: str) -> None:
        self.parent = parent
        """None: a root, or a node that is no longer in the tree."""
        self.key = key
        self.blocks = blocks
        self.salt = salt
        self.children: dict[bytes, Node] = {}
        """By the child's first block."""
        self.watches: dict[tuple[int, bytes], dict[Watch, None]] = {}
        """By where in this node the match ends (in blocks) and by the block their key goes on with."""
        self.last_used = 0
        self.is_queued = False
        self.hashes: list[bytes] = []
        """Chained hashes of the blocks, where somebody wants them."""
        self.state_slot = 0
        """Where the model's state after the last block is kept; 0: nowhere."""

    def __repr__(self) -> str:
        return f"Node({self.blocks.tolist()}, {len(self.children)} children)"

    @property
    def num_blocks(self) -> int:
        return int(self.blocks.size)


class Watch:
    """How much of one key is in the tree; `num_blocks` is kept up to date."""

    __slots__ = ("key", "node", "num_blocks", "offset", "on_change")

    def __init__(self, key: bytes, on_change: "Callable[[Watch], None]") -> None:
        self.key = key
        self.on_change = on_change
        self.num_blocks = 0
        self.node: Node | None = None
        """The node the match ends in; None: no longer watching."""
        self.offset = 0
        """Blocks of `node` that belong to the match."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a match ends: `offset` blocks into `node`; `num_blocks` counts from the root."""

    node: Node
    offset: int
    num_blocks: int

    def block_ids(self) -> Int32Array:
        """The matched blocks in token order."""
        runs = [self.node.blocks[: self.offset]]
        above = self.node.parent
        while above is not None:
            runs.append(above.blocks)
            above = above.parent
        return np.concatenate(runs[::-1])


class RadixTree:
    """Prefixes by salt. Blocks are names to it; not thread-safe."""

    def __init__(self, block_size: int) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self._roots: dict[str, Node] = {}
        self.num_blocks = 0

    def match(self, key: bytes, salt: str = "") -> Place | None:
        """The longest known prefix of `key`; None if not even its first block is known."""
        root = self._roots.get(salt)
        if root is None:
            return None
        place = self._walk(Place(root, 0, 0), key)
        return place if place.num_blocks else None

    def insert(self, key: bytes, salt: str, place: Place | None, block_ids: Int32Array) -> Node:
        """Add the blocks behind `place`, the match of `key`, which must not be the whole key."""
        if place is None:
            place = Place(self._root(salt), 0, 0)
        node = self.end_at(place)
        start = place.num_blocks * self._block_bytes
        child = Node(node, key[start:], block_ids, salt)
        assert len(child.key) == block_ids.size * self._block_bytes > 0
        first = key[start : start + self._block_bytes]
        node.children[first] = child
        self.num_blocks += child.num_blocks
        for watch in node.watches.pop((node.num_blocks, first), ()):
            self._settle(watch, self._walk(Place(node, node.num_blocks, watch.num_blocks), watch.key))
        return child

    def end_at(self, place: Place) -> Node:
        """The node that ends at a place; one that goes on there is split."""
        return place.node if place.offset == place.node.num_blocks else self._split(place.node, place.offset)

    def trim(self, leaf: Node, num_blocks: int) -> Node:
        """Remove the last blocks of a leaf; returns the node that now ends its path."""
        assert not leaf.children
        left = leaf.num_blocks - num_blocks
        parent, stays = leaf.parent, leaf
        assert parent is not None
        assert left >= 0
        if left == 0:
            del parent.children[leaf.key[: self._block_bytes]]
            stays = parent
        moved = [
            (offset, watch) for (offset, _), them in leaf.watches.items() if offset > left for watch in them
        ]
        leaf.watches = {at: them for at, them in leaf.watches.items() if at[0] <= left}
        leaf.key = leaf.key[: left * self._block_bytes]
        leaf.blocks = leaf.blocks[:left]
        self.num_blocks -= num_blocks
        for offset, watch in moved:
            self._settle(watch, Place(stays, stays.num_blocks, watch.num_blocks - (offset - left)))
        if left == 0:
            leaf.parent = None
            self._drop_root_if_unused(parent)
        return stays

    def watch(self, key: bytes, salt: str, on_change: Callable[[Watch], None]) -> Watch:
        """Follow a key from now on. `on_change` is not called for the first match."""
        watch = Watch(key, on_change)
        self._register(watch, self._walk(Place(self._root(salt), 0, 0), key))
        return watch

    def unwatch(self, watch: Watch) -> None:
        node = watch.node
        assert node is not None, "not watching"
        at = (watch.offset, self._block(watch.key, watch.num_blocks))
        them = node.watches[at]
        del them[watch]
        if not them:
            del node.watches[at]
            self._drop_root_if_unused(node)
        watch.node = None

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def roots(self) -> Iterator[Node]:
        yield from self._roots.values()

    def check_invariants(self) -> None:
        """Runs, children, watches and the number of blocks agree."""
        num_blocks = 0
        for node in self.nodes():
            assert node.parent is not None
            assert node.num_blocks * self._block_bytes == len(node.key) > 0
            assert node.parent.children[node.key[: self._block_bytes]] is node
            assert node.salt == node.parent.salt
            num_blocks += node.num_blocks
        assert num_blocks == self.num_blocks, (num_blocks, self.num_blocks)
        for node in [*self._roots.values(), *self.nodes()]:
            for (offset, following), them in node.watches.items():
                for watch in them:
                    place = self._walk(Place(self._roots[node.salt], 0, 0), watch.key)
                    assert (place.node, place.offset, place.num_blocks) == (node, offset, watch.num_blocks)
                    assert (watch.node, watch.offset) == (node, offset)
                    assert following == self._block(watch.key, watch.num_blocks)

    # ----- places

    def _walk(self, place: Place, key: bytes) -> Place:
        """On from the end of a node, as far as `key` goes along."""
        node, size = place.node, self._block_bytes
        at, end = place.num_blocks * size, len(key)
        while at < end:
            child = node.children.get(key[at : at + size])
            if child is None:
                break
            if not key.startswith(child.key, at):
                shared = self._num_common(child.key, key, at)
                return Place(child, shared, at // size + shared)
            node = child
            at += len(child.key)
        return Place(node, node.num_blocks, at // size)

    def _num_common(self, run: bytes, key: bytes, at: int) -> int:
        """Leading blocks that a run shares with the key's rest."""
        length = min(len(run), len(key) - at)
        ours = np.frombuffer(run, np.int32, length // TOKEN_BYTES)
        theirs = np.frombuffer(key, np.int32, length // TOKEN_BYTES, at)
        differs = ours != theirs
        first = int(differs.argmax())
        num_tokens = first if differs[first] else length // TOKEN_BYTES
        return num_tokens * TOKEN_BYTES // self._block_bytes

    def _root(self, salt: str) -> Node:
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(None, b"", NO_BLOCKS, salt)
        return root

    def _drop_root_if_unused(self, node: Node) -> None:
        if not (node.children or node.watches or node.key) and self._roots.get(node.salt) is node:
            del self._roots[node.salt]

    def _split(self, node: Node, offset: int) -> Node:
        """Part a node; returns the new node, its first `offset` blocks. The old one keeps the rest."""
        parent, cut = node.parent, offset * self._block_bytes
        assert parent is not None
        upper = Node(parent, node.key[:cut], node.blocks[:offset], node.salt)
        upper.last_used = node.last_used
        upper.hashes, node.hashes = node.hashes[:offset], node.hashes[offset:]
        parent.children[node.key[: self._block_bytes]] = upper
        node.parent, node.key, node.blocks = upper, node.key[cut:], node.blocks[offset:]
        upper.children[node.key[: self._block_bytes]] = node
        watches, node.watches = node.watches, {}
        for (at, following), them in watches.items():
            holder, place = (upper, at) if at <= offset else (node, at - offset)
            holder.watches[place, following] = them
            for watch in them:
                watch.node, watch.offset = holder, place
        return upper

    # ----- watches

    def _block(self, key: bytes, index: int) -> bytes:
        """Block `index` of a key; empty behind its end."""
        return key[index * self._block_bytes : (index + 1) * self._block_bytes]

    def _register(self, watch: Watch, place: Place) -> None:
        watch.node, watch.offset, watch.num_blocks = place.node, place.offset, place.num_blocks
        at = (place.offset, self._block(watch.key, place.num_blocks))
        place.node.watches.setdefault(at, {})[watch] = None

    def _settle(self, watch: Watch, place: Place) -> None:
        self._register(watch, place)
        watch.on_change(watch)
