"""What a prompt engine tells its source about a prompt: chunk by chunk, then whole."""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.errors import LayoutError
from kv_transfer.layout import BlockIds, Region, as_block_ids, check_block_ids, num_blocks_for
from kv_transfer.messages import ChoiceStart


@dataclass(frozen=True, slots=True)
class Announcement:
    """The first blocks of a prompt of `num_tokens` tokens that is still being computed.

    `block_ids` are all whole blocks whose KV is written, in sequence order. They stay so until the prompt is
    offered or withdrawn, or computed once more, which is another `attempt`: then they may have held something
    else meanwhile, be they the same. What was announced of another attempt, or of other blocks, is void.
    """

    handover_id: str
    num_tokens: int
    block_ids: Sequence[int] | BlockIds
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Offer:
    """A computed prompt whose blocks stay pinned until the `Released` event with its id.

    `block_ids` are the engine's blocks in sequence order, `ceil(num_tokens / block_size)` of them, none of
    them the null block 0. `first_tokens` are those of the choices that go on from this prompt, at least one;
    blocks that are lent from a cache have none. `attempt` as of an announcement.
    """

    handover_id: str
    num_tokens: int
    block_ids: Sequence[int] | BlockIds
    state_slot: int | None
    first_tokens: tuple[ChoiceStart, ...]
    attempt: int = 0


def check_announcement(announcement: Announcement, block_size: int, regions: Sequence[Region]) -> BlockIds:
    """The announced block ids as an array; `LayoutError` if they do not fit the tokens or the pool."""
    ids = as_block_ids(announcement.block_ids)
    if not 1 <= ids.size * block_size <= announcement.num_tokens:
        raise LayoutError(
            f"hand-over {announcement.handover_id} announces {ids.size} whole blocks of {block_size} tokens "
            f"of a prompt of {announcement.num_tokens} tokens"
        )
    _check_kv(ids, regions)
    return ids


def check_offer(offer: Offer, block_size: int, regions: Sequence[Region]) -> BlockIds:
    """The offer's block ids as an array; `LayoutError` if they do not fit the tokens or the pool."""
    ids = as_block_ids(offer.block_ids)
    expected = num_blocks_for(offer.num_tokens, block_size)
    if offer.num_tokens < 1 or ids.size != expected:
        raise LayoutError(
            f"hand-over {offer.handover_id} offers {ids.size} blocks for {offer.num_tokens} tokens; "
            f"blocks of {block_size} tokens make that {expected}"
        )
    _check_kv(ids, regions)
    if offer.state_slot is not None:
        state = next((region for region in regions if region.kind == "state"), None)
        if state is None or not 0 <= offer.state_slot < state.num_blocks:
            raise LayoutError(f"state_slot {offer.state_slot} is not a row of a registered state region")
    return ids


def _check_kv(ids: BlockIds, regions: Sequence[Region]) -> None:
    kv = next(region for region in regions if region.kind == "kv")
    check_block_ids(ids, kv.num_blocks, first=1, what="block_ids")
