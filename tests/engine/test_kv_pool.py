import pytest
import torch

from engine import kv_pool
from engine.errors import KVPoolError
from engine.kv_pool import KVLayout, KVPool

LAYOUT = KVLayout(num_layers=3, block_size=4, num_kv_heads=2, head_dim=8)


def test_a_block_is_one_contiguous_piece_of_memory() -> None:
    pool = KVPool(LAYOUT, num_blocks=5)
    assert LAYOUT.block_bytes == 3 * 4 * 2 * 2 * 8 * 4
    assert pool.tensor.shape == (5, 3, 4, 2, 2, 8)
    assert pool.tensor[2].data_ptr() == pool.address + 2 * pool.block_bytes
    assert pool.tensor[2].is_contiguous()
    pool.check_invariants()


def test_the_views_by_token_and_by_layer_show_the_same_memory() -> None:
    pool = KVPool(LAYOUT, num_blocks=5)
    block, layer, token = 4, 1, 3
    pool.tensor[block, layer, token].fill_(7.0)
    assert (pool.token_rows[(block * 3 + layer) * 4 + token] == 7).all()
    assert pool.layer_rows[block * 3 + layer].sum() == 7 * 2 * 2 * 8
    assert pool.tensor.sum() == pool.layer_rows.sum()


def test_a_new_pool_is_zero_and_can_be_zeroed_again() -> None:
    pool = KVPool(LAYOUT, num_blocks=2)
    assert not pool.tensor.any()
    pool.tensor.fill_(1.0)
    pool.zero()
    assert not pool.tensor.any()


def test_copy_block_changes_the_destination_only() -> None:
    pool = KVPool(LAYOUT, num_blocks=4)
    pool.tensor.copy_(torch.arange(4.0).view(4, 1, 1, 1, 1, 1).expand_as(pool.tensor))
    pool.copy_block(3, 1)
    assert [float(pool.tensor[block].mean()) for block in range(4)] == [0.0, 3.0, 2.0, 3.0]


def test_the_memory_given_is_filled_with_whole_blocks() -> None:
    assert KVPool.of_bytes(LAYOUT, 7 * LAYOUT.block_bytes - 1).num_blocks == 6


@pytest.mark.parametrize("kv_bytes", [0, LAYOUT.block_bytes, 2 * LAYOUT.block_bytes - 1])
def test_too_little_memory_for_a_usable_block_names_the_option(kv_bytes: int) -> None:
    with pytest.raises(KVPoolError, match="raise --kv-bytes"):
        KVPool.of_bytes(LAYOUT, kv_bytes)


@pytest.mark.parametrize("kv_bytes", [1 << 46, 1 << 70])
def test_more_memory_than_the_machine_has_names_the_option(kv_bytes: int) -> None:
    with pytest.raises(KVPoolError, match="lower --kv-bytes"):
        KVPool.of_bytes(LAYOUT, kv_bytes)


def test_a_container_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "_container_bytes", lambda: 2 * LAYOUT.block_bytes)
    assert KVPool(LAYOUT, 2).num_blocks == 2
    with pytest.raises(KVPoolError, match="lower --kv-bytes"):
        KVPool(LAYOUT, 3)


def test_layouts_that_differ_have_different_texts() -> None:
    assert str(LAYOUT) == "float32[3,block_size,2,2,8]"
