"""What a sink checks before it believes a source or reads from it. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kv_transfer.errors import LayoutError
from kv_transfer.layout import BlockIds, Region, RegionKind, check_block_ids, num_blocks_for
from kv_transfer.messages import Grant, Introduction
from kv_transfer.transport import BlockRead


@dataclass(frozen=True, slots=True)
class SourceBlocks:
    """Where a granted prompt lies in the source's regions."""

    block_ids: BlockIds
    state_slot: int | None


def difference_to(
    message: Introduction, engine_id: str, transport: str, regions: Sequence[Region]
) -> tuple[str, str, str] | None:
    """`(field, their value, our value)` of the first thing that forbids reading from this source."""
    ours = ", ".join(f"{region.kind} of {region.block_bytes} bytes" for region in regions)
    theirs = ", ".join(f"{info.kind} of {info.block_bytes} bytes" for info in message.regions)
    if any(info.num_blocks < 1 or info.block_bytes < 1 for info in message.regions):
        theirs = "an empty region"
    for name, their_value, our_value in (
        ("engine_id", message.engine_id, engine_id),
        ("transport", message.transport, transport),
        ("regions", theirs, ours),
    ):
        if their_value != our_value:
            return name, their_value, our_value
    return None


def region_index(regions: Sequence[Region], kind: RegionKind) -> int:
    for index, region in enumerate(regions):
        if region.kind == kind:
            return index
    raise LayoutError(f"there is no {kind} region")


def check_grant(grant: Grant, block_size: int, remote_regions: Sequence[Region], max_blocks: int) -> BlockIds:
    """The granted blocks; `LayoutError` unless they are `ceil(num_tokens / block_size)` of the source's."""
    if grant.generation < 1:
        raise LayoutError("a grant needs a generation")
    if len(grant.block_ids) % 4:
        raise LayoutError("block_ids is not a list of int32")
    ids = np.frombuffer(grant.block_ids, dtype="<i4").astype(np.int32)
    expected = num_blocks_for(grant.num_tokens, block_size)
    if grant.num_tokens < 1 or ids.size != expected:
        raise LayoutError(f"{ids.size} blocks were offered for {grant.num_tokens} tokens, not {expected}")
    if ids.size > max_blocks:
        raise LayoutError(f"{ids.size} blocks are over max_blocks ({max_blocks})")
    kv = remote_regions[region_index(remote_regions, "kv")]
    check_block_ids(ids, kv.num_blocks, first=1, what="the offered block_ids")
    if grant.state_slot is not None:
        state = remote_regions[region_index(remote_regions, "state")]
        if grant.state_slot >= state.num_blocks:
            raise LayoutError(f"the offered state_slot {grant.state_slot} is not below {state.num_blocks}")
    return ids


def plan_reads(
    source: SourceBlocks,
    local_ids: BlockIds,
    local_slot: int | None,
    first_block: int,
    regions: Sequence[Region],
) -> list[BlockRead]:
    """The reads that bring the blocks from `first_block` on, and the state row, to their destination.

    `LayoutError` if the destination does not match the source or lies outside `regions`.
    """
    remote_ids = source.block_ids[max(0, first_block) :]
    if first_block < 0 or remote_ids.size != local_ids.size:
        raise LayoutError(
            f"{local_ids.size} local blocks from block {first_block} on do not match the "
            f"{source.block_ids.size} offered"
        )
    if (local_slot is None) != (source.state_slot is None):
        raise LayoutError(f"local_state_slot is {local_slot}, the offered one {source.state_slot}")
    kv = region_index(regions, "kv")
    check_block_ids(local_ids, regions[kv].num_blocks, first=1, what="local_block_ids")
    reads = [BlockRead(kv, remote_ids, local_ids)] if local_ids.size else []
    if local_slot is not None and source.state_slot is not None:
        state = region_index(regions, "state")
        slots = np.array([local_slot], dtype=np.int32)
        check_block_ids(slots, regions[state].num_blocks, first=0, what="local_state_slot")
        reads.append(BlockRead(state, np.array([source.state_slot], dtype=np.int32), slots))
    return reads
