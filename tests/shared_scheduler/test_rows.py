import numpy as np
import pytest

from shared_scheduler import CorruptionError
from shared_scheduler.rows import NEW_TOKENS_WIDTH, SequenceRows
from tests.shared_scheduler.builders import sequence


def taken(rows: SequenceRows, name: str = "a", length: int = 3) -> int:
    s = sequence(name, length)
    row = rows.take(s)
    s.bind_row(rows, row, end_length=100)
    return row


def test_rows_and_tables_grow_and_keep_their_contents() -> None:
    rows = SequenceRows(capacity=1, width=2, max_width=16)
    first = taken(rows)
    rows.append_blocks(first, np.array([1, 2, 3], np.int32))
    second = taken(rows, "b")
    rows.append_blocks(second, np.array([4], np.int32))
    assert rows.table(first).tolist() == [1, 2, 3]
    assert rows.table(second).tolist() == [4]
    rows.check_invariants()


def test_a_table_wider_than_any_sequence_needs_raises() -> None:
    rows = SequenceRows(1, 2, max_width=4)
    with pytest.raises(CorruptionError, match="5 blocks"):
        rows.append_blocks(taken(rows), np.arange(1, 6, dtype=np.int32))


def test_a_returned_row_leaves_an_empty_table() -> None:
    rows = SequenceRows(1, 4, 4)
    row = taken(rows)
    rows.append_blocks(row, np.array([1, 2], np.int32))
    rows.give_back(row)
    assert not rows.tables.any()
    with pytest.raises(CorruptionError, match="given back twice"):
        rows.give_back(row)


def test_cutting_a_table_returns_the_blocks_cut_off() -> None:
    rows = SequenceRows(1, 4, 4)
    row = taken(rows)
    rows.append_blocks(row, np.array([5, 6, 7], np.int32))
    assert rows.cut_blocks(row, 1).tolist() == [6, 7]
    assert rows.tables[row].tolist() == [5, 0, 0, 0]


def test_new_tokens_reach_their_sequence_when_the_row_is_full() -> None:
    rows = SequenceRows(1, 4, 4)
    row = taken(rows)
    owner = rows.owners[row]
    for token in range(NEW_TOKENS_WIDTH + 5):
        rows.append_token(row, token)
    assert owner.num_stored > 3
    assert owner.token_ids == [10, 11, 12, *range(NEW_TOKENS_WIDTH + 5)]


def test_one_token_each_and_single_tokens_agree() -> None:
    together, apart = SequenceRows(2, 4, 4), SequenceRows(2, 4, 4)
    all_rows = np.array([taken(together, "a"), taken(together, "b")], np.intp)
    single = [taken(apart, "a"), taken(apart, "b")]
    for token in range(700):
        ids = np.array([token, token + 1])
        together.append_one_each(all_rows, ids)
        for row, token_id in zip(single, ids.tolist(), strict=True):
            apart.append_token(row, token_id)
    for one, other in zip(all_rows.tolist(), single, strict=True):
        assert together.owners[one].token_ids == apart.owners[other].token_ids
