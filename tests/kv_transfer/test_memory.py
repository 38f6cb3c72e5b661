import gc

from kv_transfer.layout import Region
from kv_transfer.memory import HUGE_PAGE_BYTES, HugePageRegion
from kv_transfer.transports.raw import region_view


def test_region_is_aligned_zeroed_and_of_the_asked_size() -> None:
    region = HugePageRegion(3_000_001)
    assert region.address % HUGE_PAGE_BYTES == 0
    assert (region.num_bytes, region.buffer.nbytes) == (3_000_001, 3_000_001)
    assert not region.buffer.any()


def test_view_by_address_is_the_same_memory() -> None:
    region = HugePageRegion(4096 * 4)
    view = region_view(Region("kv", region.address, 4096, 4))
    view[2, 5] = 7
    assert region.buffer[2 * 4096 + 5] == 7


def test_buffer_keeps_the_pages_when_the_region_is_gone() -> None:
    buffer = HugePageRegion(4096).buffer
    gc.collect()
    buffer[:] = 3
    assert buffer.sum() == 3 * 4096
