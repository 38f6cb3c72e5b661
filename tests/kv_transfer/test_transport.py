import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.transport import BlockRead, merge_runs, sort_pairs
from kv_transfer.transports.pieces import (
    MAX_EXTENT_BYTES,
    MAX_EXTENTS,
    MAX_PIECE_BYTES,
    MAX_STAGED_BYTES,
    PIECE_BYTES,
    STAGED_BELOW_BYTES,
    Piece,
    cut,
    is_staged,
)


def ids(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def test_consecutive_pairs_become_one_run() -> None:
    runs = merge_runs(ids(4, 5, 6, 9), ids(1, 2, 3, 4))
    assert runs.remote_starts.tolist() == [4, 9]
    assert runs.local_starts.tolist() == [1, 4]
    assert runs.lengths.tolist() == [3, 1]


def test_both_lists_are_sorted_together() -> None:
    remote, local = sort_pairs(ids(9, 4, 5), ids(3, 1, 2))
    assert (remote.tolist(), local.tolist()) == ([4, 5, 9], [1, 2, 3])
    assert merge_runs(ids(9, 4, 5), ids(3, 1, 2)).lengths.tolist() == [2, 1]


def test_run_breaks_where_only_one_side_is_consecutive() -> None:
    assert merge_runs(ids(1, 2), ids(5, 7)).lengths.tolist() == [1, 1]
    assert merge_runs(ids(), ids()).lengths.tolist() == []


def pairs() -> st.SearchStrategy[tuple[list[int], list[int]]]:
    distinct = st.lists(st.integers(0, 60), max_size=40, unique=True)
    return distinct.flatmap(lambda remote: st.tuples(st.just(remote), st.permutations(range(len(remote)))))


@given(pairs())
def test_runs_are_the_same_pairs(lists: tuple[list[int], list[int]]) -> None:
    remote, local = lists
    runs = merge_runs(ids(*remote), ids(*local))
    expanded = {
        (int(r) + step, int(loc) + step)
        for r, loc, n in zip(runs.remote_starts, runs.local_starts, runs.lengths, strict=True)
        for step in range(n)
    }
    assert expanded == set(zip(remote, local, strict=True))


@given(pairs(), st.sampled_from([64, 100_000, STAGED_BELOW_BYTES, PIECE_BYTES, 1_433_600]))
def test_pieces_cover_each_byte_once_and_obey_the_limits(
    lists: tuple[list[int], list[int]], block_bytes: int
) -> None:
    remote, local = lists
    pieces = cut([BlockRead(0, ids(*remote), ids(*local))], [block_bytes])
    moved = []
    for piece in pieces:
        assert len(piece.remote) <= MAX_EXTENTS
        limit = MAX_STAGED_BYTES if is_staged(piece.remote) else MAX_PIECE_BYTES
        assert piece.num_bytes == piece.remote[:, 1].sum() <= limit
        assert piece.remote[:, 1].max() <= MAX_EXTENT_BYTES
        assert (piece.remote[:, 1] == piece.local[:, 1]).all()
        moved += [(r, loc, n) for (r, n), (loc, _) in zip(piece.remote, piece.local, strict=True)]
    assert sum(n for _, _, n in moved) == len(remote) * block_bytes
    target = dict(zip(remote, local, strict=True))
    for source, destination, length in moved:
        first, last = source // block_bytes, (source + length - 1) // block_bytes
        assert destination - source == (target[first] - first) * block_bytes
        assert target[last] - target[first] == last - first


def sizes(piece: Piece) -> list[int]:
    return [int(size) for size in piece.remote[:, 1]]


def test_small_blocks_share_a_frame() -> None:
    scattered = BlockRead(0, ids(*range(1, 65, 2)), ids(*range(1, 65, 2)))
    pieces = cut([scattered], [65536])
    assert [sizes(piece) for piece in pieces] == [[65536] * 16] * 2
    assert all(is_staged(piece.remote) for piece in pieces)


def test_middling_blocks_share_a_message_in_frames_of_their_own() -> None:
    scattered = BlockRead(0, ids(1, 3, 5, 7, 9), ids(1, 3, 5, 7, 9))
    pieces = cut([scattered], [STAGED_BELOW_BYTES])
    assert [len(piece.remote) for piece in pieces] == [4, 1]
    assert not any(is_staged(piece.remote) for piece in pieces)


def test_large_blocks_travel_alone_and_long_runs_are_split_evenly() -> None:
    large = BlockRead(0, ids(1, 3), ids(1, 3))
    assert [sizes(piece) for piece in cut([large], [1_468_416])] == [[1_468_416]] * 2
    run = BlockRead(0, ids(*range(1, 41)), ids(*range(1, 41)))
    assert [sizes(piece) for piece in cut([run], [65536])] == [[1_310_720], [1_310_720]]


def test_tiny_blocks_are_limited_by_their_number() -> None:
    count = 3 * MAX_EXTENTS
    tiny = BlockRead(0, ids(*range(0, 2 * count, 2)), ids(*range(0, 2 * count, 2)))
    assert [len(piece.remote) for piece in cut([tiny], [16])] == [MAX_EXTENTS] * 3
