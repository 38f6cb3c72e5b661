import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_scheduler import AllocStatus, BlockManager, ConfigError, CorruptionError
from tests.shared_scheduler.histories import examples


def test_blocks_are_handed_out_from_one_up() -> None:
    blocks = BlockManager(5)
    assert blocks.allocate(2).tolist() == [1, 2]
    assert blocks.allocate_one() == 3
    assert blocks.num_free == 1


def test_a_freed_block_is_reused_last() -> None:
    blocks = BlockManager(5)
    blocks.allocate(3)
    blocks.free([2, 1])
    assert blocks.allocate(3).tolist() == [4, 2, 1]


def test_the_ring_wraps_around() -> None:
    blocks = BlockManager(4)
    blocks.allocate(2)
    blocks.free([2, 1])
    assert blocks.allocate(3).tolist() == [3, 2, 1]


@pytest.mark.parametrize(
    ("wanted", "status"),
    [(0, AllocStatus.OK), (2, AllocStatus.OK), (3, AllocStatus.LATER), (4, AllocStatus.LATER)],
)
def test_can_allocate_looks_at_free_blocks(wanted: int, status: AllocStatus) -> None:
    blocks = BlockManager(5)
    blocks.allocate(2)
    assert blocks.can_allocate(wanted) is status


def test_as_many_blocks_as_the_pool_is_large_never_fit() -> None:
    assert BlockManager(5).can_allocate(5) is AllocStatus.NEVER


def test_a_pinned_block_returns_with_its_last_owner() -> None:
    blocks = BlockManager(3)
    blocks.allocate(1)
    blocks.pin([1])
    assert blocks.num_shared == 1
    blocks.free([1])
    assert (blocks.num_free, blocks.num_shared) == (1, 0)
    blocks.free([1])
    assert blocks.num_free == 2


def test_a_block_freed_twice_raises() -> None:
    blocks = BlockManager(3)
    blocks.allocate(1)
    blocks.free([1])
    with pytest.raises(CorruptionError, match="block 1 freed while it is free"):
        blocks.free([1])


def test_a_block_named_twice_in_one_list_raises() -> None:
    blocks = BlockManager(3)
    blocks.allocate(2)
    with pytest.raises(CorruptionError, match="named twice"):
        blocks.free([1, 2, 1])


@pytest.mark.parametrize("block_id", [0, 3, -1])
def test_an_id_outside_the_pool_raises(block_id: int) -> None:
    blocks = BlockManager(3)
    blocks.allocate(2)
    with pytest.raises(CorruptionError, match="outside"):
        blocks.free([block_id])


def test_pinning_a_free_block_raises() -> None:
    with pytest.raises(CorruptionError, match="pinned while it is free"):
        BlockManager(3).pin([1])


def test_taking_more_than_is_free_raises() -> None:
    with pytest.raises(CorruptionError, match="3 blocks taken with 2 free"):
        BlockManager(3).allocate(3)


def test_reset_is_refused_while_something_is_held() -> None:
    blocks = BlockManager(3)
    blocks.allocate(1)
    with pytest.raises(CorruptionError, match="1 blocks are held"):
        blocks.reset()
    blocks.free([1])
    blocks.reset()
    assert blocks.allocate(2).tolist() == [1, 2]


def test_a_pool_without_usable_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="state slot"):
        BlockManager(1, "state slot")


@examples(100)
@given(st.integers(2, 12), st.lists(st.tuples(st.sampled_from(["take", "pin", "free"]), st.integers(0, 11))))
def test_counts_follow_a_plain_model(num_blocks: int, actions: list[tuple[str, int]]) -> None:
    blocks = BlockManager(num_blocks)
    free, counts = list(range(1, num_blocks)), dict.fromkeys(range(1, num_blocks), 0)
    for action, number in actions:
        held = [block for block, count in counts.items() if count]
        if action == "take" and number <= len(free):
            taken = blocks.allocate(number).tolist()
            assert taken == free[:number]
            del free[:number]
            counts |= dict.fromkeys(taken, 1)
        elif action == "pin" and held:
            block = held[number % len(held)]
            blocks.pin([block])
            counts[block] += 1
        elif action == "free" and held:
            block = held[number % len(held)]
            blocks.free([block])
            counts[block] -= 1
            if not counts[block]:
                free.append(block)
        blocks.check_invariants()
        assert blocks.num_free == len(free)
        assert blocks.counts().tolist() == [0, *counts.values()]
