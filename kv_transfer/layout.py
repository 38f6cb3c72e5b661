"""What two engines must agree on before one may read the other's memory."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kv_transfer.errors import LayoutError

RegionKind = Literal["kv", "state", "scratch"]
"""`scratch` is what peers test the path with."""

BlockIds: TypeAlias = npt.NDArray[np.int32]

ABSENT = "(absent)"


@dataclass(frozen=True, slots=True)
class Region:
    """One registered piece of memory: `num_blocks` contiguous blocks of `block_bytes` from `address`.

    The owner keeps the memory mapped for as long as any transport has it registered: unmapping it crashes
    the peers that read it. A state pool is a region whose blocks are its rows.
    """

    kind: RegionKind
    address: int
    block_bytes: int
    num_blocks: int
    num_parts: int = 1
    """Contiguous parts of a block, each with all its tokens in order: the layers of a KV block."""
    num_heads: int = 1
    """KV heads of the whole model; the kv regions of an engine share them out, in order."""
    device_id: int | None = None
    """Of the GPU whose memory it is; None: the host's. Only NIXL reads a GPU's."""

    def __post_init__(self) -> None:
        if self.address <= 0 or self.block_bytes < 1 or self.num_blocks < 1:
            raise LayoutError(
                f"region {self.kind} needs a positive address, block_bytes and num_blocks, got "
                f"{self.address:#x}, {self.block_bytes}, {self.num_blocks}"
            )

    @property
    def num_bytes(self) -> int:
        return self.block_bytes * self.num_blocks


@dataclass(frozen=True, slots=True)
class Identity:
    """Who an engine is (`engine_id`, and `epoch` of this start) and what a peer must share with it."""

    engine_id: str
    epoch: int
    compatibility: Mapping[str, str] = field(default_factory=dict)
    """Must hold `block_size`, the number of tokens in one block. It may differ: one side's must be a multiple
    of the other's."""

    def __post_init__(self) -> None:
        if not self.compatibility.get("block_size", "").isdecimal() or self.block_size < 1:
            raise LayoutError(
                "compatibility needs a positive integer block_size, got "
                f"{self.compatibility.get('block_size', ABSENT)}"
            )

    @property
    def block_size(self) -> int:
        return int(self.compatibility["block_size"])

    @property
    def compatibility_hash(self) -> str:
        return compatibility_hash(self.compatibility)


BLOCK_SIZE = "block_size"


def compatibility_hash(fields: Mapping[str, str]) -> str:
    """Hash over all fields but the block size, independent of their order; equal ones may be paired."""
    digest = hashlib.sha256()
    for name in sorted(fields.keys() - {BLOCK_SIZE}):
        for text in (name, fields[name]):
            data = text.encode()
            digest.update(len(data).to_bytes(4, "big") + data)
    return digest.hexdigest()[:16]


def first_difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, str, str] | None:
    """`(field, our value, their value)` of the first field in alphabetical order that forbids a hand-over."""
    for name in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(name, ABSENT), theirs.get(name, ABSENT)
        if mine != other and not (name == BLOCK_SIZE and _divide_each_other(mine, other)):
            return name, mine, other
    return None


def _divide_each_other(left: str, right: str) -> bool:
    if not (left.isdecimal() and right.isdecimal()):
        return False
    smaller, larger = sorted((int(left), int(right)))
    return smaller > 0 and larger % smaller == 0


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def as_block_ids(ids: Sequence[int] | BlockIds) -> BlockIds:
    """An own, contiguous int32 copy of `ids`."""
    return np.array(ids, dtype=np.int32, ndmin=1).reshape(-1)


def check_block_ids(ids: BlockIds, num_blocks: int, *, first: int, what: str) -> None:
    """`LayoutError` unless every id is in `[first, num_blocks)` and none is there twice."""
    if ids.size == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < first or high >= num_blocks:
        raise LayoutError(f"{what} must lie in [{first}, {num_blocks}), got ids from {low} to {high}")
    if np.unique(ids).size != ids.size:
        raise LayoutError(f"{what} names a block twice")
