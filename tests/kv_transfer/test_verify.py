"""Digests of blocks: what is compared, also between unequal block sizes, and what a mismatch does."""

import time

import numpy as np
import numpy.typing as npt
import pytest

from kv_transfer import digests
from kv_transfer.digests import DIGEST_BYTES, MAX_DIGESTS, TokenDigests, source_digests, tokens_per_digest
from kv_transfer.events import Arrived, Offered, Released
from kv_transfer.layout import Region
from kv_transfer.memory import HugePageRegion
from kv_transfer.offer_digests import OfferDigests
from kv_transfer.offers import Announcement, Offer
from kv_transfer.settings import TransferSettings
from kv_transfer.transports.fake import FakeTransport
from tests.kv_transfer.builders import FIRST, offer
from tests.kv_transfer.ends import a_sink, a_source, address_of

VERIFY = TransferSettings(verify_kv=True)
NUM_PARTS, TOKEN_BYTES = 2, 3
LEASE_S, SLICE_S = 3.0, 0.3


def run(slot: int | None, corrupt: set[int], source: TransferSettings = VERIFY) -> tuple[object, object]:
    """The sink's final event of one hand-over of two blocks, and the source's."""
    with a_source(settings=source) as prompt, a_sink(settings=VERIFY) as sink:
        assert isinstance(sink.transport, FakeTransport)
        sink.transport.corrupt = corrupt
        sink.sink.request("h", address_of(prompt.source.control_address))
        prompt.source.offer(offer(slot=slot))
        assert isinstance(sink.event(), Offered)
        sink.sink.pull("h", [7, 8], slot)
        return sink.event(), prompt.event()


@pytest.mark.parametrize("slot", [None, 2])
def test_bytes_that_are_right_arrive(slot: int | None) -> None:
    assert run(slot, set()) == (Arrived("h", FIRST), Released("h", "released"))


@pytest.mark.parametrize(
    ("slot", "corrupt", "text"),
    [
        (None, {8}, "1 of 2 blocks are not what the prompt engine computed: 1"),
        (None, {7, 8}, "2 of 2 blocks are not what the prompt engine computed: 0, 1"),
        (2, {2}, "the state row 2 is not what the prompt engine computed"),
    ],
)
def test_t13_bytes_that_are_wrong_fail_and_name_their_place(
    slot: int | None, corrupt: set[int], text: str
) -> None:
    failed, released = run(slot, corrupt)
    assert (failed.reason, failed.blocks_safe) == ("corrupt", True)  # type: ignore[attr-defined]
    assert text in failed.message  # type: ignore[attr-defined]
    assert released == Released("h", "abandoned")


def test_source_that_sends_no_digests_is_not_believed() -> None:
    failed, _ = run(None, set(), source=TransferSettings())
    assert failed.reason == "corrupt"  # type: ignore[attr-defined]
    assert "start it with --verify-kv too" in failed.message  # type: ignore[attr-defined]


class Side:
    """A pool of blocks [NUM_PARTS, block_size, TOKEN_BYTES]."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        self._memory = HugePageRegion(num_blocks * NUM_PARTS * block_size * TOKEN_BYTES)
        self.kv = self._memory.buffer.reshape(num_blocks, NUM_PARTS, block_size, TOKEN_BYTES)
        block_bytes = NUM_PARTS * block_size * TOKEN_BYTES
        self.region = Region("kv", self._memory.address, block_bytes, num_blocks, NUM_PARTS)

    def put(self, block_ids: list[int], tokens: np.ndarray) -> None:
        """`tokens`: [NUM_PARTS, num_tokens, TOKEN_BYTES]."""
        for position in range(tokens.shape[1]):
            block, row = divmod(position, self.block_size)
            self.kv[block_ids[block], :, row] = tokens[:, position]


NUM_TOKENS = 14
"""The last block of either side is not full."""


@pytest.mark.parametrize(("source_size", "sink_size"), [(4, 4), (4, 8), (8, 4), (4, 2), (2, 8)])
@pytest.mark.parametrize("first_block", [0, 1])
@pytest.mark.parametrize("wrong_token", [None, 0, 5, 8, 13])
def test_every_token_is_compared_between_unequal_blocks_also_of_blocks_read_in_part(
    source_size: int, sink_size: int, first_block: int, wrong_token: int | None
) -> None:
    """With `first_block` the sink had the tokens before it already, perhaps half a block of the source."""
    tokens = np.random.default_rng(0).integers(0, 256, (NUM_PARTS, NUM_TOKENS, TOKEN_BYTES), dtype=np.uint8)
    source, sink = Side(source_size, 17), Side(sink_size, 17)
    source_ids = np.arange(-(-NUM_TOKENS // source_size), 0, -1, dtype=np.int32)
    sink_ids = np.arange(2, 2 - (-NUM_TOKENS // sink_size), dtype=np.int32)
    source.put(source_ids.tolist(), tokens)
    sink.put(sink_ids.tolist(), tokens)
    if wrong_token is not None:
        block, row = divmod(wrong_token, sink_size)
        sink.kv[sink_ids[block], -1, row, 0] ^= 1
    expected = source_digests([source.region], source_size, NUM_TOKENS, source_ids, None)
    assert len(expected) == NUM_TOKENS * DIGEST_BYTES
    found = TokenDigests([sink.region], sink_size, num_tokens=NUM_TOKENS, group=1, first_block=first_block)
    while not found.is_done(sink_ids[first_block:]):
        found.advance(sink_ids[first_block:], max_bytes=1)
    is_looked_at = wrong_token is not None and wrong_token >= first_block * sink_size
    assert found.wrong_blocks(expected) == ([wrong_token // sink_size] if is_looked_at else [])  # type: ignore[operator]


def test_a_long_prompt_has_as_many_digests_as_a_message_takes() -> None:
    assert [tokens_per_digest(n, 32) for n in (1, MAX_DIGESTS, MAX_DIGESTS + 1, 9 * MAX_DIGESTS)] == [
        1,
        1,
        2,
        16,
    ]
    assert tokens_per_digest(100 * MAX_DIGESTS, 32) == 32
    assert tokens_per_digest(MAX_DIGESTS + 1, 25) == 5


def test_a_lease_outlives_the_hashing_of_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashing takes many leases at either end; both go on renewing meanwhile."""
    whole = digests.TokenDigests.advance

    def slowly(self: TokenDigests, ids: npt.NDArray[np.int32], max_bytes: int = 1) -> int:
        time.sleep(SLICE_S)
        return whole(self, ids, max_bytes=1)

    monkeypatch.setattr(digests.TokenDigests, "advance", slowly)
    settings = TransferSettings(verify_kv=True, lease_s=LEASE_S)
    with a_source(settings=settings) as prompt, a_sink(settings=settings) as sink:
        began_s = time.monotonic()
        sink.sink.request("h", address_of(prompt.source.control_address))
        prompt.source.offer(offer(num_tokens=48, block_ids=range(1, 13)))
        assert isinstance(sink.event(), Offered)
        sink.sink.pull("h", range(1, 13))
        assert sink.event() == Arrived("h", FIRST)
        assert time.monotonic() - began_s > 2 * LEASE_S


def test_what_is_announced_is_hashed_before_the_prompt_is_whole() -> None:
    side = Side(4, 17)
    queue = OfferDigests([side.region], 4)
    ids = np.arange(1, 4, dtype=np.int32)
    queue.announce(Announcement("h", 12, (1, 2)), ids[:2])
    assert queue.is_busy
    assert queue.work() == []
    assert not queue.is_busy
    side.kv[1] ^= 1  # a block that is not looked at again
    queue.offer(Offer("h", 12, (1, 2, 3), None, FIRST), ids)
    ((_, _, found),) = queue.work()
    assert found[: 8 * DIGEST_BYTES] != source_digests([side.region], 4, 12, ids, None)[: 8 * DIGEST_BYTES]
    assert found[8 * DIGEST_BYTES :] == source_digests([side.region], 4, 12, ids, None)[8 * DIGEST_BYTES :]
    assert not queue.is_busy


def test_a_prompt_that_is_computed_once_more_elsewhere_is_hashed_again() -> None:
    side = Side(4, 17)
    side.kv[:] = np.arange(17, dtype=np.uint8)[:, None, None, None]
    queue = OfferDigests([side.region], 4)
    queue.announce(Announcement("h", 8, (1,)), np.array([1], dtype=np.int32))
    queue.work()
    moved = np.array([5, 6], dtype=np.int32)
    queue.offer(Offer("h", 8, (5, 6), None, FIRST), moved)
    ((_, _, found),) = queue.work()
    assert found == source_digests([side.region], 4, 8, moved, None)


def test_a_prompt_that_is_computed_once_more_in_the_same_blocks_is_hashed_again() -> None:
    side = Side(4, 17)
    queue = OfferDigests([side.region], 4)
    ids = np.array([1, 2], dtype=np.int32)
    queue.announce(Announcement("h", 8, (1,)), ids[:1])
    queue.work()
    side.kv[1] ^= 1
    queue.offer(Offer("h", 8, (1, 2), None, FIRST, attempt=1), ids)
    ((_, _, found),) = queue.work()
    assert found == source_digests([side.region], 4, 8, ids, None)


def test_a_withdrawn_offer_comes_out_without_being_hashed() -> None:
    side = Side(4, 17)
    queue = OfferDigests([side.region], 4)
    ids = np.array([1, 2], dtype=np.int32)
    queue.announce(Announcement("gone", 8, (1,)), ids[:1])
    queue.withdraw("gone")
    queue.offer(Offer("h", 8, (1, 2), None, FIRST), ids)
    queue.withdraw("h")
    ((item, _, found),) = queue.work()
    assert (item.handover_id, found) == ("h", b"")
    assert not queue.is_busy
