"""Blocks of two engines cut into pieces of one size, so that unequal blocks can be read from each other.

A KV block is [layers, block_size, ...]: `num_parts` contiguous parts, one for each layer, each with the
block's tokens in order. A *unit* is the tokens of the smaller of the two block sizes; it lies in a block of
either side as one piece for each part. Cut like that both pools are plain arrays of equal pieces, which any
transport can read.
"""

from dataclasses import dataclass, replace

import numpy as np

from kv_transfer.layout import BlockIds, Region, num_blocks_for


@dataclass(frozen=True, slots=True)
class Units:
    """`per_remote` and `per_local` units make a block of each side; equal blocks are one piece as a whole."""

    num_parts: int
    per_remote: int
    per_local: int
    num_tokens: int
    """Of one unit."""

    @property
    def remote_block_size(self) -> int:
        return self.per_remote * self.num_tokens

    @property
    def local_block_size(self) -> int:
        return self.per_local * self.num_tokens

    def count(self, num_tokens: int) -> int:
        return num_blocks_for(num_tokens, self.num_tokens)

    def cut_remote(self, region: Region) -> Region:
        """The region as an array of pieces."""
        return _cut(region, self.num_parts * self.per_remote)

    def cut_local(self, region: Region) -> Region:
        """The region as an array of pieces."""
        return _cut(region, self.num_parts * self.per_local)

    def remote_pieces(self, block_ids: BlockIds, first: int, end: int) -> BlockIds:
        """Pieces of the units first..end-1 of a sequence whose blocks are `block_ids`, unit by unit."""
        return _pieces(block_ids, np.arange(first, end), self.per_remote, self.num_parts)

    def local_pieces(self, block_ids: BlockIds, first: int, end: int, first_block: int) -> BlockIds:
        """As `remote_pieces`; `block_ids` begin with block `first_block` of the sequence."""
        units = np.arange(first, end) - first_block * self.per_local
        return _pieces(block_ids, units, self.per_local, self.num_parts)


def units_of(remote_block_bytes: int, local: Region, block_size: int) -> Units | None:
    """How to cut; None if neither block is a multiple of the other.

    `local` holds blocks of `block_size` tokens, and both sides keep as many bytes for a token.
    """
    if remote_block_bytes == local.block_bytes:
        return Units(1, 1, 1, block_size)
    smaller, larger = sorted((remote_block_bytes, local.block_bytes))
    factor, rest = divmod(larger, smaller)
    if rest or smaller % local.num_parts:
        return None
    if remote_block_bytes > local.block_bytes:
        return Units(local.num_parts, factor, 1, block_size)
    if block_size % factor:
        return None
    return Units(local.num_parts, 1, factor, block_size // factor)


def _cut(region: Region, pieces_per_block: int) -> Region:
    size, rest = divmod(region.block_bytes, pieces_per_block)
    assert not rest, f"{region} does not hold {pieces_per_block} equal pieces in a block"
    return replace(region, block_bytes=size, num_blocks=region.num_blocks * pieces_per_block)


def _pieces(
    block_ids: BlockIds, units: "np.typing.NDArray[np.int64]", per_block: int, num_parts: int
) -> BlockIds:
    blocks, within = block_ids[units // per_block].astype(np.int64), units % per_block
    parts = np.arange(num_parts)
    pieces = (blocks[:, None] * num_parts + parts) * per_block + within[:, None]
    return pieces.reshape(-1).astype(np.int32)
