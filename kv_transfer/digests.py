"""Digests of KV: computed at the source of what it offers, compared at the sink with what has arrived.

Each covers a few neighbouring tokens in all layers, whatever the blocks they lie in: so two engines with
unequal blocks compare every token that was read, also of blocks that were read in part. Hashing takes a
second per GB, so it is done in slices, between which leases are renewed.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kv_transfer.errors import LayoutError
from kv_transfer.layout import BlockIds, Region, num_blocks_for
from kv_transfer.transports.raw import region_view

DIGEST_BYTES = 8
MAX_DIGESTS = 65536
"""Of a prompt's tokens: as many as a message takes."""
SLICE_BYTES = 16 << 20
"""Hashed at a time: about 20 ms."""


def tokens_per_digest(num_tokens: int, source_block_size: int) -> int:
    """One, or the smallest share of a block of the source that makes few enough; at most that block."""
    for group in range(1, source_block_size):
        if source_block_size % group == 0 and num_tokens <= group * MAX_DIGESTS:
            return group
    return source_block_size


class TokenDigests:
    """The digests of a sequence's tokens, from its block `first_block` on."""

    def __init__(
        self,
        ranks: Sequence[Region],
        block_size: int,
        *,
        num_tokens: int,
        group: int,
        first_block: int = 0,
    ) -> None:
        """`ranks`: kv regions that have every head once; a token is hashed as one rank alone would have it.

        `group`: tokens of one digest. `LayoutError` if blocks do not hold whole groups of tokens.
        """
        region = ranks[0]
        if block_size % group or region.block_bytes % (region.num_parts * block_size):
            raise LayoutError(
                f"digests of {group} tokens cannot be computed over blocks of {block_size} "
                f"({region.block_bytes} bytes in {region.num_parts} parts)"
            )
        self._views = [region_view(rank) for rank in ranks]
        self._shape = (region.num_parts, block_size, -1)
        self._block_size = block_size
        self._num_tokens = num_tokens
        self._group = group
        self._first_block = first_block
        self._num_blocks = 0
        self._found = bytearray()

    def is_done(self, block_ids: BlockIds) -> bool:
        return self._num_blocks >= block_ids.size

    def advance(self, block_ids: BlockIds, max_bytes: int = SLICE_BYTES) -> int:
        """Go on with `block_ids`, which begin with those that are done; returns the bytes hashed."""
        num_bytes = 0
        while not self.is_done(block_ids) and num_bytes < max_bytes:
            self._found += self._of_block(int(block_ids[self._num_blocks]))
            self._num_blocks += 1
            num_bytes += sum(view.shape[1] for view in self._views)
        return num_bytes

    @property
    def found(self) -> bytes:
        return bytes(self._found)

    def wrong_blocks(self, expected: bytes) -> list[int]:
        """Numbers of the blocks with a token whose digest is not the expected one of all tokens."""
        per_block = self._block_size // self._group
        skipped = self._first_block * per_block * DIGEST_BYTES
        mine = np.frombuffer(self._found, dtype="<u8")
        theirs = np.frombuffer(expected[skipped : skipped + len(self._found)], dtype="<u8")
        if mine.size != theirs.size:
            return list(range(self._first_block, self._first_block + self._num_blocks))
        differing = np.flatnonzero(mine != theirs) // per_block + self._first_block
        return sorted(set(differing.tolist()))

    def _of_block(self, block_id: int) -> bytes:
        first_token = (self._first_block + self._num_blocks) * self._block_size
        num_valid = min(self._block_size, self._num_tokens - first_token)
        tokens = np.ascontiguousarray(self._rows_of(block_id).swapaxes(0, 1))
        groups = range(0, num_valid, self._group)
        return b"".join(digest_of(tokens[start : min(start + self._group, num_valid)]) for start in groups)

    def _rows_of(self, block_id: int) -> npt.NDArray[np.uint8]:
        """[parts, tokens, bytes]: each token's keys of all heads, then its values."""
        if len(self._views) == 1:
            rows: npt.NDArray[np.uint8] = self._views[0][block_id].reshape(self._shape)
            return rows
        halves = [view[block_id].reshape(*self._shape[:2], 2, -1) for view in self._views]
        return np.concatenate(halves, axis=3).reshape(self._shape)


def whole_sets(regions: Sequence[Region]) -> list[list[Region]]:
    """The kv regions as sets that have every head once: several where ranks have what others have too."""
    kv = [region for region in regions if region.kind == "kv"]
    num_copies = max(1, len(kv) // kv[0].num_heads)
    return [kv[copy::num_copies] for copy in range(num_copies)]


def source_digests(
    regions: Sequence[Region], block_size: int, num_tokens: int, block_ids: BlockIds, state_slot: int | None
) -> bytes:
    """Those of all tokens, then that of the state row if there is one."""
    group = tokens_per_digest(num_tokens, block_size)
    tokens = TokenDigests(whole_sets(regions)[0], block_size, num_tokens=num_tokens, group=group)
    while not tokens.is_done(block_ids):
        tokens.advance(block_ids)
    return tokens.found + state_digest(regions, state_slot)


def state_digest(regions: Sequence[Region], state_slot: int | None) -> bytes:
    """Empty where there is none."""
    if state_slot is None:
        return b""
    state = next(region for region in regions if region.kind == "state")
    return digest_of(region_view(state)[[state_slot]])


def num_digests(num_tokens: int, source_block_size: int) -> int:
    """Of a prompt's tokens."""
    return num_blocks_for(num_tokens, tokens_per_digest(num_tokens, source_block_size))


def digest_of(rows: npt.NDArray[np.uint8]) -> bytes:
    return hashlib.blake2b(rows.data, digest_size=DIGEST_BYTES).digest()
