"""Linear layers whose weights lie in the kernels' order."""

import ctypes
import threading
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import WeightFormatError
from engine.model.linear import WeightFormat
from engine.native.library import CLinear, Runtime
from kv_transfer.memory import HugePageRegion


class PanelFormat(IntEnum):
    """As in src/panels.h."""

    FLOAT32 = 0
    FLOAT16 = 1
    INT4 = 2
    INT8 = 3


_CANDIDATES: dict[WeightFormat, tuple[PanelFormat, ...]] = {
    "fp32": (PanelFormat.FLOAT32,),
    "fp16w": (PanelFormat.FLOAT16,),
    "q4": (PanelFormat.INT4, PanelFormat.INT8, PanelFormat.FLOAT16),
}
"""The first that holds a matrix is taken."""
_LARGEST_FLOAT16 = 65504.0
_REGION_BYTES = 64 << 20
_ALIGNMENT = 64
_PANEL = 16


class Arena:
    """Memory on huge pages for weights that live as long as the model; threads may share it.

    Small pages cost a quarter of the rate at which a step of one row reads its weights.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """`num_bytes` of zeros that nobody else is given."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if size > _REGION_BYTES // 4:
            return HugePageRegion(size).buffer
        with self._lock:
            if size > self._free.size:
                self._free = HugePageRegion(_REGION_BYTES).buffer
            taken, self._free = self._free[:size], self._free[size:]
        return taken


class NativeLinear:
    """Packed weights; row t of a product depends on row t alone, to the last bit."""

    def __init__(
        self,
        runtime: Runtime,
        arena: Arena,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        weight_format: WeightFormat,
    ) -> None:
        """`weight` float32 [out, in], `bias` float32 [out]; neither is kept."""
        self._runtime = runtime
        self.num_outputs, self.num_inputs = weight.shape
        self.format, self._panels = self._pack(arena, weight.contiguous(), weight_format)
        self._bias = None if bias is None else _padded(bias.numpy())
        self.c = CLinear(
            self._panels.ctypes.data,
            None if self._bias is None else self._bias.ctypes.data,
            self.num_outputs,
            self.num_inputs,
            self.format,
        )

    def _pack(
        self, arena: Arena, weight: torch.Tensor, weight_format: WeightFormat
    ) -> tuple[PanelFormat, npt.NDArray[np.uint8]]:
        library, shape = self._runtime.library, (self.num_outputs, self.num_inputs)
        for panel_format in _CANDIDATES[weight_format]:
            if panel_format is PanelFormat.FLOAT16 and weight.abs().amax() > _LARGEST_FLOAT16:
                raise WeightFormatError(
                    "a weight of this model is too large for float16; start with --dtype fp32"
                )
            # What may not fit is tried outside the arena, which takes nothing back.
            num_bytes = library.packed_bytes(panel_format, *shape)
            panels = np.zeros(num_bytes, np.uint8)
            if library.pack(panel_format, weight.data_ptr(), *shape, panels.ctypes.data):
                kept = arena.take(num_bytes)
                np.copyto(kept[:num_bytes], panels)
                return panel_format, kept
        raise AssertionError("float formats hold every matrix")

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.contiguous()
        outputs = torch.empty(len(rows), self.num_outputs)
        self._runtime.library.linear(
            self._runtime.handle, ctypes.addressof(self.c), rows.data_ptr(), len(rows), outputs.data_ptr()
        )
        return outputs


def _padded(bias: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Zeros up to a whole number of panels."""
    return np.pad(bias, (0, -len(bias) % _PANEL))
