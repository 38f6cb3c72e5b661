"""Which engine has which prompts cached, as far as this proxy has sent them there.

An estimate: engines evict without telling. Whole blocks are named by a chain of hashes, each of a block's
tokens and of the name before it; the blocks used last are remembered.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from proxy.engines import EngineStart

MAX_BLOCKS = 200_000


class PrefixIndex:
    """Block name → the engines that were sent the block, newest last."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._holders: OrderedDict[int, set[EngineStart]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def insert(self, token_ids: Sequence[int], block_size: int, engines: Iterable[EngineStart]) -> None:
        """These engines have computed, or taken over, the tokens."""
        starts = frozenset(engines)
        for name in _chain(token_ids, block_size):
            self._holders.setdefault(name, set()).update(starts)
            self._holders.move_to_end(name)
        while len(self._holders) > self._max_blocks:
            self._holders.popitem(last=False)

    def num_cached(
        self, token_ids: Sequence[int], block_size: int, engines: Iterable[EngineStart]
    ) -> Mapping[EngineStart, int]:
        """Leading tokens that each engine should have; those that have none are left out."""
        found: dict[EngineStart, int] = {}
        holders = set(engines)
        for number, name in enumerate(_chain(token_ids, block_size), 1):
            holders &= self._holders.get(name, set())
            if not holders:
                break
            found |= dict.fromkeys(holders, number * block_size)
        return found


def _chain(token_ids: Sequence[int], block_size: int) -> Iterator[int]:
    """Names of the full blocks, in order; equal in this process only."""
    name = block_size
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        name = hash((name, tuple(token_ids[start : start + block_size])))
        yield name
