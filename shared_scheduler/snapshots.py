"""States of models that keep one beside their blocks, as they were at the end of cached prefixes.

A cached prefix of such a model can be used only where its state is kept: in a slot of the state pool that is
owned by the tree's node that ends there.

1. `keep`     a prompt has been computed up to a checkpoint; its state is copied into a slot of its own
2. `deepest`  finds the longest part of a cached prefix with a state; a sequence starts from a copy of it
3. `drop`     the node goes, its state with it; or a slot is needed, and the least recently used state goes
"""

from shared_scheduler.block_manager import BlockManager
from shared_scheduler.radix_tree import Node, Place


class Snapshots:
    """The kept states of one tree; they count as free slots while no copy of them is being made."""

    def __init__(self, states: BlockManager) -> None:
        self._states = states
        self._by_age: dict[Node, None] = {}
        """Least recently used first."""
        states.serve_cache(self._evict)

    def deepest(self, place: Place | None) -> Place | None:
        """The end of the longest matched prefix that has a state."""
        while place is not None and not (place.node.state_slot and place.offset == place.node.num_blocks):
            above = place.node.parent
            if above is None:
                return None
            place = Place(above, above.num_blocks, place.num_blocks - place.offset)
        return place

    def keep(self, node: Node) -> int | None:
        """A slot for the state at the node's end, to be copied into; None: it has one, or none is free."""
        if node.state_slot or not self._states.num_free:
            return None
        slot = self._states.allocate_one()
        self._states.own([slot])
        self._states.free([slot])
        node.state_slot = slot
        self._by_age[node] = None
        return slot

    def touch(self, node: Node) -> None:
        """The state counts as just used."""
        if node.state_slot:
            del self._by_age[node]
            self._by_age[node] = None

    def drop(self, node: Node) -> None:
        if node.state_slot:
            del self._by_age[node]
            self._states.disown([node.state_slot])
            node.state_slot = 0

    def check_invariants(self) -> None:
        """Every cached slot belongs to one node."""
        slots = sorted(node.state_slot for node in self._by_age)
        assert slots == self._states.cached().nonzero()[0].tolist(), "the pool's cached slots differ"
        assert all(node.parent is not None for node in self._by_age), "a state of a node that is gone"

    def _evict(self, num_slots: int) -> None:
        """Give up so many states that nobody copies from, or all there are."""
        unused = [node for node in self._by_age if not self._states.count(node.state_slot)]
        for node in unused[:num_slots]:
            self.drop(node)
