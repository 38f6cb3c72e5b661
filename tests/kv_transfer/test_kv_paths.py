"""Engines of unequal tensor parallelism read each other's KV: every head lands where it belongs."""

from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.digests import source_digests
from kv_transfer.errors import LayoutError
from kv_transfer.head_slices import heads_of
from kv_transfer.kv_paths import KvPlan, plan_kv
from kv_transfer.layout import BlockIds, Region
from kv_transfer.messages import Ending
from kv_transfer.sink_handover import Destination
from kv_transfer.sink_verification import Verification
from kv_transfer.transports.raw import region_view

LAYERS, HEAD_BYTES, NUM_BLOCKS = 2, 4, 12

Bytes = npt.NDArray[np.uint8]


class Side:
    """The pools of an engine's ranks: blocks [layers, block_size, 2, heads of the rank, HEAD_BYTES]."""

    def __init__(self, size: int, num_heads: int, block_size: int) -> None:
        self.block_size, self.size, self.num_heads = block_size, size, num_heads
        self.pools: list[Bytes] = []
        self.regions: list[Region] = []
        for rank in range(size):
            shape = (LAYERS, block_size, 2, len(heads_of(rank, size, num_heads)), HEAD_BYTES)
            num_bytes = int(np.prod(shape))
            pool = np.zeros((NUM_BLOCKS, *shape), np.uint8)
            self.pools.append(pool)
            self.regions.append(Region("kv", pool.ctypes.data, num_bytes, NUM_BLOCKS, LAYERS, num_heads))

    def put(self, ids: BlockIds, tokens: Bytes) -> None:
        """`tokens` [T, LAYERS, 2, all heads, HEAD_BYTES]"""
        for rank, pool in enumerate(self.pools):
            heads = heads_of(rank, self.size, self.num_heads)
            for position, token in enumerate(tokens):
                block, row = divmod(position, self.block_size)
                pool[ids[block], :, row] = token[:, :, heads.start : heads.stop]


def copy(plan: KvPlan, remote_ids: BlockIds, local_ids: BlockIds, units: range, first_block: int) -> None:
    """What a transport does with the reads of a plan."""
    for read in plan.kv_reads(remote_ids, local_ids, units, first_block):
        remote, local = region_view(plan.remote[read.region]), region_view(plan.local[read.region])
        local[read.local_ids] = remote[read.remote_ids]


def ids_of(random: np.random.Generator, num_tokens: int, block_size: int) -> BlockIds:
    free = random.permutation(np.arange(1, NUM_BLOCKS, dtype=np.int32))
    return free[: -(-num_tokens // block_size)]


SIZES = [
    (heads, remote, local)
    for heads, remote, local in product((1, 2, 3, 4, 6), (1, 2, 3, 4, 8), (1, 2, 3, 4, 8))
    if all(not heads % size or not size % heads for size in (remote, local))
]


@settings(max_examples=80)
@given(
    sizes=st.sampled_from(SIZES),
    block_sizes=st.sampled_from([(4, 4), (2, 4), (4, 2)]),
    num_tokens=st.integers(1, 20),
    first_block=st.integers(0, 2),
    seed=st.integers(0, 100),
)
def test_every_head_of_every_token_arrives(
    sizes: tuple[int, int, int], block_sizes: tuple[int, int], num_tokens: int, first_block: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    num_heads, remote_size, local_size = sizes
    source, sink, expected = (
        Side(size, num_heads, block_size)
        for size, block_size in (
            (remote_size, block_sizes[0]),
            (local_size, block_sizes[1]),
            (local_size, block_sizes[1]),
        )
    )
    tokens = random.integers(1, 255, (num_tokens, LAYERS, 2, num_heads, HEAD_BYTES), np.uint8)
    remote_ids, local_ids = (ids_of(random, num_tokens, size) for size in block_sizes)
    source.put(remote_ids, tokens)
    plan = plan_kv(source.regions, sink.regions, sink.block_size)
    assert plan is not None
    first_block = min(first_block, local_ids.size - 1)
    start = first_block * plan.units.per_local
    copy(plan, remote_ids, local_ids[first_block:], range(start, plan.units.count(num_tokens)), first_block)
    tokens[: first_block * sink.block_size] = 0  # these were here before
    expected.put(local_ids, tokens)
    for ours, theirs in zip(sink.pools, expected.pools, strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize(("remote", "local"), [(1, 2), (2, 1), (2, 2), (1, 8), (8, 4), (4, 1)])
@pytest.mark.parametrize("block_sizes", [(4, 4), (2, 4), (4, 2)])
def test_digests_do_not_depend_on_how_heads_are_shared_out(
    remote: int, local: int, block_sizes: tuple[int, int]
) -> None:
    random = np.random.default_rng(1)
    source, sink = Side(remote, 4, block_sizes[0]), Side(local, 4, block_sizes[1])
    tokens = random.integers(0, 255, (8, LAYERS, 2, 4, HEAD_BYTES), np.uint8)
    remote_ids, local_ids = (ids_of(random, 8, size) for size in block_sizes)
    source.put(remote_ids, tokens)
    sink.put(local_ids, tokens)
    plan = plan_kv(source.regions, sink.regions, sink.block_size)
    assert plan is not None
    ending = Ending(None, (), source_digests(source.regions, source.block_size, 8, remote_ids, None))
    destination = Destination(local_ids, None, 0)

    def difference() -> str | None:
        check = Verification(sink.regions, plan.units, destination, ending, 8)
        while not check.advance():
            pass
        return check.difference()

    assert difference() is None
    sink.pools[-1][local_ids[-1], -1, -1, 1, -1, 0] ^= 1
    last = 8 // sink.block_size - 1
    assert difference() == f"1 of {last + 1} blocks are not what the prompt engine computed: {last}"


def test_heads_that_a_size_cannot_share_out_are_refused() -> None:
    ours = Side(1, 3, 4).regions
    theirs = [Region("kv", 4096, 64, NUM_BLOCKS, LAYERS) for _ in range(2)]
    with pytest.raises(LayoutError, match="3 KV heads cannot be shared out to 2 ranks"):
        plan_kv(theirs, ours, 4)


def test_ranks_of_unequal_pools_are_refused() -> None:
    theirs = [Region("kv", 4096, 64, blocks, LAYERS) for blocks in (4, 5)]
    with pytest.raises(LayoutError, match="unequal KV pools"):
        plan_kv(theirs, Side(1, 2, 4).regions, 4)
