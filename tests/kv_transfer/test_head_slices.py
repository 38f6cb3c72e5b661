"""A rank reads each of its heads once, from a rank that holds it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.errors import LayoutError
from kv_transfer.head_slices import ByteSlice, HeadSlice, heads_of, plan_bytes, plan_heads

DEGREES = st.sampled_from([1, 2, 4, 8, 16])


def test_ranks_share_heads_out_in_order() -> None:
    assert [list(heads_of(rank, 2, 4)) for rank in range(2)] == [[0, 1], [2, 3]]
    assert [list(heads_of(rank, 4, 2)) for rank in range(4)] == [[0], [0], [1], [1]]


def test_equal_degrees_read_one_slice_of_the_same_rank() -> None:
    assert plan_heads(8, 4, 4, 3) == [HeadSlice(3, 0, 0, 2)]


def test_fewer_readers_gather_from_several_ranks() -> None:
    assert plan_heads(8, 4, 2, 1) == [HeadSlice(2, 0, 0, 2), HeadSlice(3, 0, 2, 2)]


def test_more_readers_take_a_part_of_one_rank() -> None:
    assert plan_heads(8, 2, 4, 3) == [HeadSlice(1, 2, 0, 2)]


def test_readers_of_a_head_that_several_ranks_hold_are_spread_over_them() -> None:
    assert [plan_heads(2, 8, 4, rank)[0].remote_rank for rank in range(4)] == [0, 1, 6, 7]


def test_bytes_of_a_token_row_are_keys_then_values() -> None:
    slices = plan_heads(8, 2, 4, 3)
    assert plan_bytes(slices, 64, num_remote=4, num_local=2) == [
        ByteSlice(1, 2 * 64, 0, 128),
        ByteSlice(1, 6 * 64, 2 * 64, 128),
    ]


@pytest.mark.parametrize(("rank", "size", "heads"), [(4, 4, 8), (-1, 4, 8), (0, 3, 8), (0, 6, 4)])
def test_what_cannot_be_shared_out_is_refused(rank: int, size: int, heads: int) -> None:
    with pytest.raises(LayoutError):
        heads_of(rank, size, heads)


@given(num_kv_heads=DEGREES, remote_size=DEGREES, local_size=DEGREES, data=st.data())
def test_every_local_head_comes_once_from_a_rank_that_holds_it(
    num_kv_heads: int, remote_size: int, local_size: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, local_size - 1))
    mine = heads_of(rank, local_size, num_kv_heads)
    got: list[int] = []
    for each in plan_heads(num_kv_heads, remote_size, local_size, rank):
        theirs = heads_of(each.remote_rank, remote_size, num_kv_heads)
        assert each.local_head == len(got)
        got += [theirs[each.remote_head + index] for index in range(each.num_heads)]
    assert got == list(mine)
