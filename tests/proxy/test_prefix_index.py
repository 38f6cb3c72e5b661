from proxy.engines import EngineStart
from proxy.prefix_index import PrefixIndex

A, B = EngineStart("http://a", 1), EngineStart("http://b", 1)
TOKENS = list(range(20))


def test_whole_blocks_of_the_common_prefix_are_found_per_engine() -> None:
    index = PrefixIndex()
    index.insert(TOKENS, 4, [A])
    index.insert(TOKENS[:9], 4, [B])
    assert index.num_cached(TOKENS, 4, [A, B]) == {A: 20, B: 8}
    assert index.num_cached([*TOKENS[:6], 99, 99], 4, [A, B]) == {A: 4, B: 4}
    assert index.num_cached([99, *TOKENS], 4, [A, B]) == {}


def test_an_engine_that_has_restarted_has_nothing() -> None:
    index = PrefixIndex()
    index.insert(TOKENS, 4, [A])
    assert index.num_cached(TOKENS, 4, [EngineStart("http://a", 2)]) == {}


def test_blocks_of_another_size_are_other_blocks() -> None:
    index = PrefixIndex()
    index.insert(TOKENS, 4, [A])
    assert index.num_cached(TOKENS, 2, [A]) == {}


def test_the_blocks_used_last_are_remembered() -> None:
    index = PrefixIndex(max_blocks=5)
    index.insert(TOKENS, 4, [A])
    index.insert([7] * 8, 4, [A])
    assert len(index) == 5
    assert index.num_cached([7] * 8, 4, [A]) == {A: 8}
    assert index.num_cached(TOKENS, 4, [A]) == {}
