"""Cached blocks that other engines read, and blocks of theirs that join our cache.

Lending: 1. `lend` pins a cached prefix   2. a peer reads its blocks   3. `give_back` ends the pin
Importing: 1. `reserve` pins the prefix that is here and takes blocks for what follows it
           2. a transfer, which is the caller's business, fills them
           3. `commit` puts them into the cache, or `drop` gives them up once nothing writes into them
"""

from dataclasses import dataclass

import numpy as np

from shared_scheduler.block_manager import AllocStatus, BlockManager
from shared_scheduler.errors import SchedulerError
from shared_scheduler.prefix_cache import PrefixCache
from shared_scheduler.radix_tree import key_of
from shared_scheduler.rows import Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class Loan:
    """Cached blocks that stay as they are until they are given back.

    `block_ids` int32: those from the wanted block on. `num_tokens`: leading tokens that are cached, those
    before the wanted block too.
    """

    block_ids: Int32Array
    num_tokens: int
    pinned: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class Import:
    """Blocks to be filled, `block_ids` int32, for a prefix whose first `first_block` blocks are cached."""

    block_ids: Int32Array
    first_block: int
    key: bytes
    cache_salt: str
    pinned: Int32Array


class Loans:
    """Loans and imports that are open."""

    def __init__(self, cache: PrefixCache | None, blocks: BlockManager, block_size: int) -> None:
        self._cache = cache
        self._blocks = blocks
        self._block_size = block_size
        self._open: dict[Loan | Import, None] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    def lend(self, token_ids: Int32Array, cache_salt: str, first_block: int) -> Loan | None:
        """None if block `first_block` of these tokens is not cached."""
        if self._cache is None:
            return None
        hit = self._cache.match(self._key(token_ids, token_ids.size // self._block_size), cache_salt)
        if hit.num_blocks <= first_block:
            return None
        self._cache.pin(hit)
        loan = Loan(hit.block_ids[first_block:], hit.num_blocks * self._block_size, hit.block_ids)
        self._open[loan] = None
        return loan

    def give_back(self, loan: Loan) -> None:
        self._close(loan)
        self._blocks.free(loan.pinned)

    def reserve(
        self, token_ids: Int32Array, cache_salt: str, first_block: int, num_blocks: int
    ) -> Import | None:
        """None if what precedes the blocks is not cached here, or if there is no room for them."""
        if self._cache is None or num_blocks < 1:
            return None
        end = first_block + num_blocks
        if end * self._block_size > token_ids.size:
            raise SchedulerError(
                f"blocks {first_block}..{end - 1} of {token_ids.size} tokens are to be imported, but only"
                f" {token_ids.size // self._block_size} are full"
            )
        hit = self._cache.match(self._key(token_ids, first_block), cache_salt)
        if hit.num_blocks < first_block:
            return None
        num_unused = self._blocks.num_unused(hit.block_ids)
        if self._blocks.can_allocate(num_blocks + num_unused) is not AllocStatus.OK:
            return None
        self._cache.pin(hit)
        block_ids = self._blocks.allocate(num_blocks)
        key = self._key(token_ids, end)
        pinned = np.concatenate([hit.block_ids, block_ids])
        wanted = Import(block_ids, first_block, key, cache_salt, pinned)
        self._open[wanted] = None
        return wanted

    def commit(self, wanted: Import) -> None:
        """The blocks are filled: from now on they are found. Duplicates of what came meanwhile go back."""
        self._close(wanted)
        assert self._cache is not None
        self._cache.insert(wanted.key, wanted.cache_salt, wanted.pinned, may_swap=False)
        self._blocks.free(wanted.pinned)

    def drop(self, wanted: Import) -> None:
        self._close(wanted)
        self._blocks.free(wanted.pinned)

    def pinned(self) -> Int32Array:
        """Every use of a block by a loan or an import."""
        pins = [each.pinned for each in self._open]
        return np.concatenate(pins) if pins else np.empty(0, np.int32)

    def _close(self, each: Loan | Import) -> None:
        if each not in self._open:
            raise SchedulerError(f"a {type(each).__name__.lower()} is ended that is not open")
        del self._open[each]

    def _key(self, token_ids: Int32Array, num_blocks: int) -> bytes:
        return key_of(token_ids, num_blocks, self._block_size)
