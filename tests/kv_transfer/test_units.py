"""Pools of unequal blocks as arrays of equal pieces: every number of a sequence lands where it belongs."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.events import Arrived, Offered
from kv_transfer.layout import Identity, Region, compatibility_hash, first_difference
from kv_transfer.units import Units, units_of
from tests.kv_transfer.builders import COMPATIBILITY, FIRST, Pair, Pool, identity, offer

NUM_PARTS = 3
TOKEN_BYTES = 8
"""Of one part (layer)."""

Bytes = npt.NDArray[np.uint8]


def region(block_size: int, num_blocks: int = 32) -> Region:
    return Region("kv", 4096, NUM_PARTS * block_size * TOKEN_BYTES, num_blocks, NUM_PARTS)


def test_equal_blocks_are_moved_as_a_whole() -> None:
    assert units_of(region(4).block_bytes, region(4), 4) == Units(1, 1, 1, 4)


@pytest.mark.parametrize(
    ("remote", "local", "expected"),
    [
        (8, 4, Units(NUM_PARTS, 2, 1, 4)),
        (4, 8, Units(NUM_PARTS, 1, 2, 4)),
        (12, 4, Units(NUM_PARTS, 3, 1, 4)),
    ],
)
def test_unit_is_the_smaller_block(remote: int, local: int, expected: Units) -> None:
    units = units_of(region(remote).block_bytes, region(local), local)
    assert units == expected
    assert (units.remote_block_size, units.local_block_size) == (remote, local)


def test_blocks_of_which_none_is_a_multiple_do_not_fit() -> None:
    assert units_of(region(6).block_bytes, region(4), 4) is None


def test_pieces_of_a_block_lie_one_in_every_part() -> None:
    units = Units(num_parts=2, per_remote=2, per_local=1, num_tokens=4)
    ids = np.array([5, 3], np.int32)
    # Block 5 is pieces 20..23: part 0 has its first and second half, then part 1.
    assert units.remote_pieces(ids, 0, 3).tolist() == [20, 22, 21, 23, 12, 14]
    assert units.local_pieces(ids, 1, 2, 1).tolist() == [10, 11]


@given(
    small=st.integers(1, 4),
    factor=st.integers(1, 4),
    remote_is_larger=st.booleans(),
    num_tokens=st.integers(1, 31),
    first_block=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_every_token_of_every_part_arrives(
    small: int, factor: int, remote_is_larger: bool, num_tokens: int, first_block: int, seed: int
) -> None:
    sizes = (small * factor, small) if remote_is_larger else (small, small * factor)
    remote, local = (region(size) for size in sizes)
    units = units_of(remote.block_bytes, local, sizes[1])
    assert units is not None
    random = np.random.default_rng(seed)
    source, target = (np.zeros((32, NUM_PARTS, size, TOKEN_BYTES), np.uint8) for size in sizes)
    ids = [random.permutation(np.arange(1, 32, dtype=np.int32))[: -(-num_tokens // size)] for size in sizes]
    wanted = random.integers(1, 255, (num_tokens, NUM_PARTS, TOKEN_BYTES), np.uint8)
    for token in range(num_tokens):
        source[ids[0][token // sizes[0]], :, token % sizes[0]] = wanted[token]
    first_block = min(first_block, len(ids[1]))
    first, end = min(first_block * units.per_local, units.count(num_tokens)), units.count(num_tokens)
    flat_source, flat_target = (
        pool.reshape(cut.num_blocks, cut.block_bytes)
        for pool, cut in ((source, units.cut_remote(remote)), (target, units.cut_local(local)))
    )
    to = units.local_pieces(ids[1][first_block:], first, end, first_block)
    flat_target[to] = flat_source[units.remote_pieces(ids[0], first, end)]
    for token in range(num_tokens):
        expected = wanted[token] if token >= first_block * sizes[1] else np.zeros_like(wanted[token])
        assert np.array_equal(target[ids[1][token // sizes[1]], :, token % sizes[1]], expected)


# The hello


def test_block_size_is_not_a_part_of_the_compatibility_hash() -> None:
    assert compatibility_hash(COMPATIBILITY) == compatibility_hash(COMPATIBILITY | {"block_size": "8"})
    assert compatibility_hash(COMPATIBILITY) != compatibility_hash(COMPATIBILITY | {"dtype": "float16"})


@pytest.mark.parametrize(
    ("theirs", "differs"), [("8", False), ("2", False), ("6", True), ("x", True), ("0", True)]
)
def test_block_sizes_must_divide_each_other(theirs: str, differs: bool) -> None:
    difference = first_difference(COMPATIBILITY, COMPATIBILITY | {"block_size": theirs})
    assert difference == (("block_size", "4", theirs) if differs else None)


@pytest.mark.parametrize("field", ["tensor_parallel", "dtype", "model", "kv_layout", "state"])
def test_any_other_difference_is_refused_naming_the_field(field: str) -> None:
    """T17."""
    source = Identity("prompt-0", 1, COMPATIBILITY | {field: "other"})
    pair = Pair(source_identity=source)
    pair.reader.request()
    pair.run()
    (failed,) = pair.reader.take_events()
    assert "incompatible" in str(failed)
    assert f"{field} is other there" in str(failed)


# A whole hand-over


@pytest.mark.parametrize("local_size", [2, 8])
def test_hand_over_between_unequal_blocks_by_chunks(local_size: int) -> None:
    """The source has blocks of 4 tokens in 4 parts; 18 tokens, 16 of them computed first."""
    pair = unequal_pair(local_size)
    source_ids, num_local = (3, 5, 9, 2, 4), -(-18 // local_size)
    local_ids = tuple(range(1, num_local + 1))[::-1]
    pair.reader.request()
    pair.announce(source_ids[:3], 18)
    pair.run()
    assert pair.reader.take_events() == [Offered("h", 18, num_local)]
    pair.reader.pull(local_ids)
    pair.announce(source_ids[:4], 18)
    pair.run()
    pair.offer(offer("h", 18, source_ids))
    pair.run()
    assert pair.reader.take_events() == [Arrived("h", FIRST)]
    assert np.array_equal(
        rows_of(pair.pool, source_ids, 4)[:18], rows_of(pair.reader.pool, local_ids, local_size)[:18]
    )
    assert pair.reader.counters.bytes_read == -(-18 // min(4, local_size)) * min(4, local_size) * 1024


@pytest.mark.parametrize(("local_size", "num_units"), [(2, 7), (8, 3)])
def test_blocks_that_are_here_are_skipped_in_units_of_either_side(local_size: int, num_units: int) -> None:
    pair = unequal_pair(local_size)
    first_block = {2: 2, 8: 1}[local_size]
    num_local = -(-18 // local_size)
    local_ids = tuple(range(1, num_local + 1 - first_block))
    pair.reader.request()
    pair.offer(offer("h", 18, (3, 5, 9, 2, 4)))
    pair.run()
    pair.reader.pull(local_ids, first_block=first_block)
    pair.run()
    assert pair.reader.take_events() == [Offered("h", 18, num_local), Arrived("h", FIRST)]
    start = first_block * local_size
    assert np.array_equal(
        rows_of(pair.pool, (3, 5, 9, 2, 4), 4)[start:18],
        rows_of(pair.reader.pool, local_ids, local_size)[: 18 - start],
    )
    assert pair.reader.counters.bytes_read == num_units * min(4, local_size) * 1024


def unequal_pair(local_size: int) -> Pair:
    """Each token has 4 parts of 256 bytes; the source's numbers all differ."""
    pair = Pair(
        reader_pool=Pool(block_bytes=local_size * 1024, num_parts=4),
        reader_identity=identity("completion-0", 9, block_size=str(local_size)),
    )
    pair.pool.kv[:] = np.random.default_rng(0).integers(1, 255, pair.pool.kv.shape, np.uint8)
    return pair


def rows_of(pool: Pool, block_ids: tuple[int, ...], block_size: int) -> Bytes:
    """[tokens, parts, bytes] of a sequence."""
    blocks = pool.kv.reshape(-1, 4, block_size, 256)[list(block_ids)]
    rows: Bytes = blocks.transpose(0, 2, 1, 3).reshape(-1, 4, 256)
    return rows
