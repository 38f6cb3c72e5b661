"""Digests of blocks: what is compared, also between unequal block sizes, and what a mismatch does."""

import numpy as np
import pytest

from kv_transfer.digests import DIGEST_BYTES, source_digests, wrong_blocks
from kv_transfer.events import Arrived, Offered, Released
from kv_transfer.layout import Region
from kv_transfer.memory import HugePageRegion
from kv_transfer.settings import TransferSettings
from kv_transfer.transports.fake import FakeTransport
from kv_transfer.units import units_of
from tests.kv_transfer.builders import FIRST, offer
from tests.kv_transfer.ends import a_sink, a_source, address_of

VERIFY = TransferSettings(verify_kv=True)
NUM_PARTS, TOKEN_BYTES = 2, 3


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


@pytest.mark.parametrize(("source_size", "sink_size"), [(4, 4), (4, 8), (8, 4), (4, 2), (2, 8)])
@pytest.mark.parametrize("wrong_token", [None, 0, 5, 15])
def test_unequal_blocks_are_compared_in_the_order_of_the_source(
    source_size: int, sink_size: int, wrong_token: int | None
) -> None:
    tokens = np.random.default_rng(0).integers(0, 256, (NUM_PARTS, 16, TOKEN_BYTES), dtype=np.uint8)
    source, sink = Side(source_size, 17), Side(sink_size, 17)
    source_ids = list(range(16 // source_size, 0, -1))
    sink_ids = list(range(2, 2 + 16 // sink_size))
    source.put(source_ids, tokens)
    sink.put(sink_ids, tokens)
    if wrong_token is not None:
        block, row = divmod(wrong_token, sink_size)
        sink.kv[sink_ids[block], -1, row, 0] ^= 1
    expected = source_digests([source.region], np.array(source_ids, dtype=np.int32), None)
    assert len(expected) == len(source_ids) * DIGEST_BYTES
    units = units_of(source.region.block_bytes, sink.region, sink_size)
    assert units is not None
    found = wrong_blocks(
        expected, sink.region, units, np.array(sink_ids, dtype=np.int32), first_block=0, num_tokens=16
    )
    assert found == ([] if wrong_token is None else [wrong_token // source_size])
