"""Views of registered memory by address."""

import ctypes

import numpy as np
import numpy.typing as npt

from kv_transfer.layout import Region


def region_view(region: Region) -> npt.NDArray[np.uint8]:
    """The region's bytes as `[num_blocks, block_bytes]`; valid while the owner keeps them mapped."""
    flat = np.ctypeslib.as_array((ctypes.c_uint8 * region.num_bytes).from_address(region.address))
    return flat.reshape(region.num_blocks, region.block_bytes)
