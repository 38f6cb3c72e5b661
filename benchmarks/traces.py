"""Block traces (`tests/data/traces`) and what a prefix cache of a given size finds of them."""

import gzip
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shared_scheduler import BlockManager, PrefixCache
from shared_scheduler.radix_tree import key_of
from shared_scheduler.rows import Int32Array

TRACES = Path(__file__).parent.parent / "tests" / "data" / "traces"
BLOCK_TOKENS = 512
"""Prompt tokens that a block id of a trace stands for."""


def read_trace(name: str) -> list[Int32Array]:
    """The block ids of every request, in order of arrival."""
    with gzip.open(TRACES / f"{name}.txt.gz", "rt") as lines:
        return [np.array(list(_ids(line)), np.int32) for line in lines]


def _ids(line: str) -> Iterator[int]:
    for run in line.split():
        first, _, last = run.partition("-")
        yield from range(int(first), int(last or first) + 1)


def hit_ratio(trace: list[Int32Array], num_blocks: int) -> float:
    """Share of all blocks that are found when the requests come one after the other."""
    pool = BlockManager(num_blocks + 1)
    cache = PrefixCache(pool, block_size=1)
    num_hits = 0
    for ids in trace:
        key = key_of(ids, ids.size, 1)
        hit = cache.match(key, "")
        cache.pin(hit)
        table = np.concatenate([hit.block_ids, pool.allocate(ids.size - hit.num_blocks)])
        cache.insert(key, "", table, may_swap=False)
        pool.free(table)
        num_hits += hit.num_blocks
    return num_hits / sum(ids.size for ids in trace)
