"""What a sink checks before it believes a source or reads from it. Pure functions."""

from collections.abc import Sequence

import numpy as np

from kv_transfer.errors import LayoutError
from kv_transfer.events import FailReason
from kv_transfer.kv_paths import KvPlan
from kv_transfer.layout import BlockIds, Region, RegionKind, check_block_ids
from kv_transfer.messages import Confirm, Ending, Introduction, RegionInfo
from kv_transfer.sink_handover import Destination
from kv_transfer.transport import BlockRead


def difference_to(
    message: Introduction, engine_id: str, transport: str, regions: Sequence[Region]
) -> tuple[str, str, str] | None:
    """`(field, their value, our value)` of the first thing that forbids reading from this source.

    KV blocks may be of other sizes, and shared out to more or fewer ranks; whether they fit is for `plan_kv`
    to say.
    """
    ours, theirs = _kinds(regions), _kinds(message.regions)
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


def _kinds(regions: Sequence[Region] | Sequence[RegionInfo]) -> str:
    others = [f"{r.kind} of {r.block_bytes} bytes" for r in regions if r.kind != "kv"]
    return ", ".join(["kv"] * (len(others) < len(regions)) + others)


def region_index(regions: Sequence[Region], kind: RegionKind) -> int:
    for index, region in enumerate(regions):
        if region.kind == kind:
            return index
    raise LayoutError(f"there is no {kind} region")


def announced_blocks(
    known: BlockIds,
    block_ids: bytes,
    ending: Ending | None,
    *,
    num_blocks: int,
    max_blocks: int,
    remote_regions: Sequence[Region],
) -> BlockIds:
    """All blocks of a prompt of `num_blocks` that are known now that `block_ids` were announced.

    `LayoutError` unless they are distinct blocks of the source, and with an ending all of the prompt's.
    """
    if not 1 <= num_blocks <= max_blocks:
        raise LayoutError(f"{num_blocks} blocks are none, or over max_blocks ({max_blocks})")
    if len(block_ids) % 4:
        raise LayoutError("block_ids is not a list of int32")
    ids = np.concatenate((known, np.frombuffer(block_ids, dtype="<i4").astype(np.int32)))
    if ids.size > num_blocks or (ending is not None and ids.size != num_blocks):
        raise LayoutError(f"{ids.size} blocks were offered of a prompt of {num_blocks}")
    if ending is None and ids.size == known.size:
        raise LayoutError("an announcement without a block")
    kv = remote_regions[region_index(remote_regions, "kv")]
    check_block_ids(ids, kv.num_blocks, first=1, what="the offered block_ids")
    if ending is not None and ending.state_slot is not None:
        state = remote_regions[region_index(remote_regions, "state")]
        if ending.state_slot >= state.num_blocks:
            raise LayoutError(f"the offered state_slot {ending.state_slot} is not below {state.num_blocks}")
    return ids


def check_destination(destination: Destination, num_blocks: int, regions: Sequence[Region]) -> None:
    """`LayoutError` unless it takes the blocks of a prompt of `num_blocks` from `first_block` on."""
    first_block, ids = destination.first_block, destination.block_ids
    if first_block < 0 or first_block + ids.size != num_blocks:
        raise LayoutError(
            f"{ids.size} local blocks from block {first_block} on do not match the {num_blocks} offered"
        )
    kv = regions[region_index(regions, "kv")]
    check_block_ids(ids, kv.num_blocks, first=1, what="local_block_ids")
    if destination.state_slot is not None:
        state = regions[region_index(regions, "state")]
        slots = np.array([destination.state_slot], dtype=np.int32)
        check_block_ids(slots, state.num_blocks, first=0, what="local_state_slot")


def plan_reads(
    remote_ids: BlockIds,
    destination: Destination,
    new_units: range,
    ending: Ending | None,
    plan: KvPlan,
) -> list[BlockRead]:
    """The reads that bring the units of tokens `new_units`, and at the end the state row.

    `LayoutError` if only one side has a state row.
    """
    reads = plan.kv_reads(remote_ids, destination.block_ids, new_units, destination.first_block)
    if ending is None:
        return reads
    if (destination.state_slot is None) != (ending.state_slot is None):
        raise LayoutError(
            f"local_state_slot is {destination.state_slot}, the offered one {ending.state_slot}"
        )
    if destination.state_slot is not None and ending.state_slot is not None:
        remote_slot, local_slot = (
            np.array([slot], dtype=np.int32) for slot in (ending.state_slot, destination.state_slot)
        )
        reads.append(BlockRead(plan.index_of("state"), remote_slot, local_slot))
    return reads


def unconfirmed(message: Confirm) -> FailReason:
    """Why a source did not confirm; what it does not know any more has expired there."""
    return "expired" if message.reason == "unknown" or message.reason == "released" else message.reason


def bytes_of(reads: Sequence[BlockRead], plan: KvPlan) -> int:
    """Of all reads together; KV is read in pieces, state rows as a whole."""
    return sum(int(read.local_ids.size) * plan.local[read.region].block_bytes for read in reads)
