"""Which engine has which blocks cached: what engines say, and what this proxy has just sent them.

Blocks are named as in `wire.cache`. Between two answers of an engine, what it was sent counts as cached; an
engine that does not tell is known by that alone. The blocks used last are remembered.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from proxy.fleet import EngineStart
from wire.cache import CacheEvent

MAX_BLOCKS = 200_000


class PrefixIndex:
    """Block name → the engines that have the block, newest last."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._holders: OrderedDict[str, set[EngineStart]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def insert(self, names: Iterable[str], engines: Iterable[EngineStart]) -> None:
        """These engines have computed the blocks, or taken them over."""
        starts = frozenset(engines)
        for name in names:
            self._holders.setdefault(name, set()).update(starts)
            self._holders.move_to_end(name)
        while len(self._holders) > self._max_blocks:
            self._holders.popitem(last=False)

    def apply(self, engine: EngineStart, event: CacheEvent) -> None:
        """What the engine says has changed."""
        match event.kind:
            case "stored":
                self.insert(event.names, (engine,))
            case "removed":
                self._remove(event.names, engine)
            case "cleared":
                self._remove(list(self._holders), engine)

    def num_cached(self, names: Sequence[str], engines: Iterable[EngineStart]) -> Mapping[EngineStart, int]:
        """Leading blocks that each engine should have; those that have none are left out."""
        found: dict[EngineStart, int] = {}
        holders = set(engines)
        for number, name in enumerate(names, 1):
            holders &= self._holders.get(name, set())
            if not holders:
                break
            found |= dict.fromkeys(holders, number)
        return found

    def _remove(self, names: Iterable[str], engine: EngineStart) -> None:
        for name in names:
            holders = self._holders.get(name)
            if holders is not None:
                holders.discard(engine)
                if not holders:
                    del self._holders[name]
