"""Blocks of one token; the tokens of a key are its letters."""

import numpy as np

from shared_scheduler import BlockManager, PrefixCache
from shared_scheduler.cache_events import CacheEventLog
from shared_scheduler.radix_tree import key_of
from wire.cache import CacheEvent, prompt_block_names, root_hash


def names(text: str, salt: str = "") -> tuple[str, ...]:
    return tuple(prompt_block_names([ord(letter) for letter in text], 1, salt))


class Publisher:
    def __init__(self, num_blocks: int = 9) -> None:
        self.blocks = BlockManager(num_blocks)
        self.cache = PrefixCache(self.blocks, block_size=1, has_events=True)
        assert self.cache.events is not None
        self.events = self.cache.events

    def store(self, text: str, salt: str = "") -> None:
        tokens = np.array([ord(letter) for letter in text], np.int32)
        table = self.blocks.allocate(tokens.size)
        self.cache.insert(key_of(tokens, tokens.size, 1), salt, table, may_swap=False)
        self.blocks.free(table)
        self.cache.check_invariants()


def stored(text: str, start: int = 0, salt: str = "") -> CacheEvent:
    whole = names(text, salt)
    parent = whole[start - 1] if start else root_hash(salt).hex()
    return CacheEvent(kind="stored", names=whole[start:], parent=parent)


def test_a_stored_prefix_is_told_by_the_names_a_router_computes() -> None:
    publisher = Publisher()
    publisher.store("abc", "salt")
    assert publisher.events.take() == (stored("abc", salt="salt"),)
    assert publisher.events.take() == ()


def test_only_what_is_new_is_told_with_its_parent() -> None:
    publisher = Publisher()
    publisher.store("abc")
    publisher.store("abxy")
    assert publisher.events.take()[1] == stored("abxy", 2)


def test_evicted_blocks_are_told() -> None:
    publisher = Publisher(num_blocks=5)
    publisher.store("abc")
    publisher.events.take()
    publisher.store("xyz")
    assert publisher.events.take() == (CacheEvent(kind="removed", names=names("abc")[1:]), stored("xyz"))


def test_when_too_much_is_pending_everything_is_told_anew() -> None:
    publisher = Publisher()
    publisher.cache.events = CacheEventLog(publisher.cache.tree, 1, max_pending=4)
    publisher.store("abc")
    publisher.store("abxy")
    events = publisher.cache.events.take()
    assert events[0] == CacheEvent(kind="cleared")
    assert {name for event in events for name in event.names} == {*names("abc"), *names("abxy")}
    publisher.store("z")
    assert publisher.cache.events.take() == (stored("z"),)
