import numpy as np
import pytest

from kv_transfer.errors import LayoutError
from kv_transfer.layout import (
    Identity,
    Region,
    check_block_ids,
    compatibility_hash,
    first_difference,
    num_blocks_for,
)


def test_hash_depends_on_every_field_and_not_on_their_order() -> None:
    fields = {"model": "tiny", "dtype": "float32"}
    assert compatibility_hash(fields) == compatibility_hash(dict(reversed(fields.items())))
    assert compatibility_hash(fields) != compatibility_hash(fields | {"dtype": "float16"})
    assert compatibility_hash({"a": "bc"}) != compatibility_hash({"ab": "c"})


def test_first_difference_is_alphabetical_and_sees_absent_fields() -> None:
    assert first_difference({"a": "1"}, {"a": "1"}) is None
    assert first_difference({"b": "1", "a": "1"}, {"b": "2", "a": "3"}) == ("a", "1", "3")
    assert first_difference({}, {"tp": "2"}) == ("tp", "(absent)", "2")


@pytest.mark.parametrize("block_size", [None, "", "0", "-4", "four"])
def test_identity_needs_a_block_size(block_size: str | None) -> None:
    with pytest.raises(LayoutError, match="block_size"):
        Identity("p", 1, {} if block_size is None else {"block_size": block_size})


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_block_count_is_rounded_up(num_tokens: int, expected: int) -> None:
    assert num_blocks_for(num_tokens, 4) == expected


@pytest.mark.parametrize("ids", [(0,), (8,), (-1,), (3, 3)])
def test_block_ids_are_in_range_and_distinct(ids: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="ids"):
        check_block_ids(np.array(ids, dtype=np.int32), 8, first=1, what="ids")
    check_block_ids(np.array([1, 7, 3], dtype=np.int32), 8, first=1, what="ids")


def test_region_without_memory_is_refused() -> None:
    with pytest.raises(LayoutError, match="region kv"):
        Region("kv", 0, 4096, 8)
