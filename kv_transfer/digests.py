"""Digests of blocks: computed at the source of what it offers, compared at the sink with what has arrived."""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kv_transfer.layout import BlockIds, Region
from kv_transfer.transports.raw import region_view
from kv_transfer.units import Units

DIGEST_BYTES = 8


def source_digests(regions: Sequence[Region], block_ids: BlockIds, state_slot: int | None) -> bytes:
    """`DIGEST_BYTES` for each block, in order, then those of the state row if there is one."""
    views = {region.kind: region_view(region) for region in regions}
    parts = [_digest(views["kv"][[block_id]]) for block_id in block_ids.tolist()]
    if state_slot is not None:
        parts.append(_digest(views["state"][[state_slot]]))
    return b"".join(parts)


def wrong_blocks(
    expected: bytes,
    region: Region,
    units: Units,
    block_ids: BlockIds,
    *,
    first_block: int,
    num_tokens: int,
) -> list[int]:
    """Numbers of the source's blocks whose bytes are not the expected ones in our `region`.

    `block_ids` are ours, from our block `first_block` of the sequence on. A block of the source that was read
    in part only, which happens between unequal block sizes, is not looked at.
    """
    view = region_view(units.cut_local(region))
    per_block = units.per_remote
    first = -(-first_block * units.per_local // per_block)
    wrong = []
    for number in range(first, units.count(num_tokens) // per_block):
        pieces = units.local_pieces(block_ids, number * per_block, (number + 1) * per_block, first_block)
        in_source_order = pieces.reshape(per_block, units.num_parts).T.reshape(-1)
        if _digest(view[in_source_order]) != expected[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]:
            wrong.append(number)
    return wrong


def is_wrong_state(expected: bytes, region: Region, slot: int) -> bool:
    return _digest(region_view(region)[[slot]]) != expected[-DIGEST_BYTES:]


def _digest(rows: npt.NDArray[np.uint8]) -> bytes:
    return hashlib.blake2b(rows.data, digest_size=DIGEST_BYTES).digest()
