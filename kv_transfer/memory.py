"""Memory that transports read well: huge pages, mapped once."""

import mmap
import os
from typing import Protocol

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


class PoolMemory(Protocol):
    """Mapped memory that a pool lives in."""

    buffer: npt.NDArray[np.uint8]

    @property
    def address(self) -> int: ...


class SharedRegion:
    """`num_bytes` of zeroed memory that several processes of one machine map, each at an address of its own.

    As with `HugePageRegion` there is no unmap. The descriptor is for children to inherit; the memory goes
    with the last mapping.
    """

    __slots__ = ("buffer", "fd")

    def __init__(self, fd: int, num_bytes: int) -> None:
        mapping = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED)
        mapping.madvise(mmap.MADV_HUGEPAGE)
        self.fd = fd
        self.buffer: npt.NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)

    @classmethod
    def create(cls, num_bytes: int) -> "SharedRegion":
        fd = os.memfd_create("tandem-kv-pool")
        os.ftruncate(fd, num_bytes)
        return cls(fd, num_bytes)

    @classmethod
    def attach(cls, fd: int, num_bytes: int) -> "SharedRegion":
        """In the process that inherited `fd`."""
        return cls(fd, num_bytes)

    @property
    def address(self) -> int:
        return int(self.buffer.ctypes.data)
