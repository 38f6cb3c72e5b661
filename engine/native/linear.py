"""Linear layers whose weights lie in the kernels' order."""

import ctypes
import threading

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import WeightFormatError
from engine.native.library import CLinear, Runtime
from kv_transfer.memory import HugePageRegion

FORMATS = {"fp32": 0, "fp16w": 1}
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
        self, runtime: Runtime, arena: Arena, weight: torch.Tensor, bias: torch.Tensor | None, name: str
    ) -> None:
        """`weight` float32 [out, in], `bias` float32 [out]; neither is kept."""
        if name == "fp16w" and weight.abs().amax() > _LARGEST_FLOAT16:
            raise WeightFormatError(
                "a weight of this model is too large for float16; start with --dtype fp32"
            )
        library, (num_outputs, num_inputs) = runtime.library, weight.shape
        weight = weight.contiguous()
        self._runtime = runtime
        self._panels = arena.take(library.packed_bytes(FORMATS[name], num_outputs, num_inputs))
        library.pack(FORMATS[name], weight.data_ptr(), num_outputs, num_inputs, self._panels.ctypes.data)
        self._bias = None if bias is None else _padded(bias.numpy())
        self.num_outputs, self.num_inputs = num_outputs, num_inputs
        self.c = CLinear(
            self._panels.ctypes.data,
            None if self._bias is None else self._bias.ctypes.data,
            num_outputs,
            num_inputs,
            FORMATS[name],
        )

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
