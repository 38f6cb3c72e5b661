"""Blocks of one token; the tokens of a key are its letters."""

import numpy as np
import pytest

from shared_scheduler import BlockManager, CorruptionError
from shared_scheduler.prefix_cache import PrefixCache
from shared_scheduler.radix_tree import key_of
from shared_scheduler.rows import Int32Array


def key(text: str) -> bytes:
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    return key_of(tokens, tokens.size, 1)


class Pool:
    """A cache over a pool of `num_usable` blocks, checked after every call."""

    def __init__(self, num_usable: int) -> None:
        self.blocks = BlockManager(num_usable + 1)
        self.cache = PrefixCache(self.blocks, block_size=1)

    def found(self, text: str, salt: str = "") -> list[int]:
        return self.cache.match(key(text), salt).block_ids.tolist()

    def use(self, text: str, salt: str = "") -> Int32Array:
        """Pin what is cached of a text and take blocks for the rest."""
        hit = self.cache.match(key(text), salt)
        self.cache.pin(hit)
        table = np.concatenate([hit.block_ids, self.blocks.allocate(len(text) - hit.num_blocks)])
        self.check()
        return table

    def store(self, text: str, table: Int32Array, salt: str = "", *, may_swap: bool = False) -> Int32Array:
        table = self.cache.insert(key(text), salt, table, may_swap=may_swap)
        self.check()
        return table

    def let_go(self, table: Int32Array) -> None:
        self.blocks.free(table)
        self.check()

    def serve(self, text: str, salt: str = "") -> None:
        """A whole life."""
        table = self.use(text, salt)
        self.cache.insert(key(text), salt, table, may_swap=False)
        self.let_go(table)

    def check(self) -> None:
        self.blocks.check_invariants()
        self.cache.check_invariants()


def test_what_was_computed_is_found_again_and_counts_as_free() -> None:
    pool = Pool(8)
    pool.serve("abc")
    assert pool.found("abcd") == [1, 2, 3]
    assert (pool.blocks.num_free, pool.blocks.num_empty, pool.blocks.num_evictable) == (8, 5, 3)


def test_different_salts_never_share_a_block() -> None:
    pool = Pool(8)
    pool.serve("abc", "mine")
    assert pool.found("abc", "yours") == []


def test_the_least_recently_used_leaf_goes_first_from_its_end() -> None:
    pool = Pool(6)
    pool.serve("abc")
    pool.serve("xyz")
    pool.use("abcd")
    assert (pool.found("xyz"), pool.found("abc")) == ([4, 5], [1, 2, 3])


def test_a_shared_prefix_outlives_what_follows_it() -> None:
    pool = Pool(6)
    pool.serve("abcd")
    pool.serve("abxy")
    pool.let_go(pool.use("1234"))
    assert (pool.found("abcd"), pool.found("abxy")) == ([1, 2], [1, 2])
    pool.let_go(pool.use("12345"))
    assert pool.found("ab") == [1]


def test_blocks_in_use_are_never_evicted() -> None:
    """Failure case T8."""
    pool = Pool(5)
    pool.serve("abcd")
    table = pool.use("abc")
    assert pool.blocks.num_free == 2
    other = pool.use("12")
    assert pool.found("abcd") == [1, 2, 3]
    with pytest.raises(CorruptionError, match="1 blocks taken with 0 free"):
        pool.blocks.allocate(1)
    pool.let_go(table)
    pool.let_go(other)
    pool.use("34567")
    assert pool.found("abc") == []


def test_a_prefix_that_two_computed_is_kept_once_and_the_second_moves_over() -> None:
    pool = Pool(8)
    first, second = pool.use("ab"), pool.use("abc")
    pool.store("ab", first)
    table = pool.store("abc", second, may_swap=True)
    assert table.tolist() == [1, 2, 5]
    pool.let_go(second[:2])
    assert (pool.found("abc"), pool.blocks.num_free) == ([1, 2, 5], 5)


def test_a_twin_that_cannot_move_over_leaves_its_end_when_it_lets_go() -> None:
    pool = Pool(8)
    first, second = pool.use("ab"), pool.use("abc")
    pool.store("ab", first)
    pool.cache.insert(key("abc"), "", second, may_swap=False)
    pool.let_go(second)
    assert (pool.found("abc"), pool.blocks.num_free) == ([1, 2, 5], 6)


def test_what_a_fork_still_uses_is_not_put_behind_another_ones_blocks() -> None:
    """Else the fork would use a block whose predecessors can be evicted."""
    pool = Pool(8)
    first, second = pool.use("a"), pool.use("ab")
    pool.blocks.pin(second)
    pool.store("a", first)
    pool.let_go(first)
    assert pool.store("ab", second, may_swap=True).tolist() == [2, 3]
    assert pool.found("ab") == [1]


def test_leaves_that_were_in_use_when_their_turn_came_are_evicted_later() -> None:
    pool = Pool(4)
    pool.serve("ab")
    table = pool.use("ab")
    pool.let_go(pool.use("12"))
    pool.let_go(table)  # nobody told the cache
    assert sorted(pool.use("1234").tolist()) == [1, 2, 3, 4]


def test_matching_changes_nothing() -> None:
    pool = Pool(4)
    pool.serve("ab")
    pool.serve("xy")
    assert pool.found("ab") == [1, 2]
    pool.use("12")
    assert (pool.found("ab"), pool.found("xy")) == ([], [3, 4])
