import pytest
import torch

from engine.errors import KVPoolError
from engine.hf.assembly import make_state_pool
from engine.model_runner import PoolSizes
from engine.state_pool import StateLayout, StatePool

LAYOUT = StateLayout(((6, 3), (6, 3), (2, 4, 5)))


def test_a_row_is_one_contiguous_piece_and_every_state_begins_at_64_bytes() -> None:
    pool = StatePool(LAYOUT, 4)
    assert LAYOUT.offsets == (0, 32, 64, 112)
    assert pool.row_bytes == 112 * 4
    assert pool.rows[2].data_ptr() == pool.address + 2 * pool.row_bytes
    pool.check_invariants()


def test_views_show_the_memory_of_the_rows_by_state() -> None:
    pool = StatePool(LAYOUT, 4)
    first, second, third = LAYOUT.views(pool.rows[1:3])
    assert [tuple(view.shape) for view in (first, second, third)] == [(2, 6, 3), (2, 6, 3), (2, 2, 4, 5)]
    third[1].fill_(7.0)
    assert pool.rows[2].sum() == 7 * 40
    assert not pool.rows[1].any()
    assert not first.any()


def test_slots_are_copied_and_zeroed_alone() -> None:
    pool = StatePool(LAYOUT, 4)
    pool.rows.copy_(torch.arange(4.0)[:, None].expand_as(pool.rows))
    pool.copy_slot(3, 1)
    pool.zero_slot(2)
    assert pool.rows.mean(1).tolist() == [0, 3, 0, 3]


def test_layouts_that_differ_have_different_short_texts() -> None:
    assert str(LAYOUT) == "float32[2*6x3; 2x4x5]"
    many = StateLayout(tuple((i, 4) for i in range(1, 99)))
    assert str(many) != str(StateLayout(many.shapes[::-1]))
    assert len(str(many)) < 64
    assert str(StateLayout((*[(8, 4)] * 36, *[(32, 128, 128)] * 36))) == "float32[36*8x4; 36*32x128x128]"


def test_memory_is_filled_with_whole_slots_or_holds_two_for_each_sequence() -> None:
    row = LAYOUT.row_bytes
    assert make_state_pool(LAYOUT, PoolSizes(state_bytes=5 * row + 1)).num_slots == 5
    assert make_state_pool(LAYOUT, PoolSizes(max_num_seqs=8)).num_slots == 17
    assert make_state_pool(LAYOUT, PoolSizes(max_num_seqs=8, kv_bytes=4 * row)).num_slots == 4


def test_too_little_memory_for_a_usable_slot_names_the_option() -> None:
    with pytest.raises(KVPoolError, match=r"2 slots of 448 bytes.*raise --state-bytes"):
        make_state_pool(LAYOUT, PoolSizes(state_bytes=2 * LAYOUT.row_bytes - 1))
    with pytest.raises(KVPoolError, match="lower --state-bytes"):
        make_state_pool(LAYOUT, PoolSizes(state_bytes=1 << 46))
