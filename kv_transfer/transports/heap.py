"""What the C library does with freed memory, in a process that receives many messages of a megabyte."""

import ctypes
import functools
import logging

logger = logging.getLogger(__name__)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 64 << 20
"""Free memory at a heap's end that is kept instead of given back to the kernel."""
FROM_HEAP_BELOW_BYTES = 4 << 20
"""Larger allocations still come from the kernel, and go back to it."""


@functools.cache
def keep_freed_messages() -> None:
    """Use the memory of a message that has been read for the next one; once for a process.

    By default it goes back to the kernel, which clears it page by page when it is asked for again: 15,000 to
    45,000 page faults for each GB that is received.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        logger.debug("this C library has no mallopt")
        return
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    mallopt(M_MMAP_THRESHOLD, FROM_HEAP_BELOW_BYTES)
