"""Memory that transports read well: huge pages, mapped once."""

import mmap

import numpy as np
import numpy.typing as npt

HUGE_PAGE_BYTES = 2 << 20


class HugePageRegion:
    """`num_bytes` of zeroed anonymous memory on huge pages where the kernel gives them.

    There is no unmap: the pages go when nothing refers to `buffer` (or this object) any more. Keep it for as
    long as a transport has the address registered. Without huge pages a same-host NIXL read is half as
    fast.
    """

    __slots__ = ("buffer",)

    def __init__(self, num_bytes: int) -> None:
        size = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        mapping = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(mapping, dtype=np.uint8)
        skip = -whole.ctypes.data % HUGE_PAGE_BYTES
        self.buffer: npt.NDArray[np.uint8] = whole[skip : skip + num_bytes]

    @property
    def address(self) -> int:
        return int(self.buffer.ctypes.data)

    @property
    def num_bytes(self) -> int:
        return int(self.buffer.nbytes)
