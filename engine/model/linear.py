"""Linear layers in the weight formats of `--dtype`."""

from typing import Literal, Protocol, cast, get_args

import torch
import torch.nn.functional as F

from engine.errors import WeightFormatError

WeightFormat = Literal["fp16w", "fp32", "q4"]
_LARGEST_FLOAT16 = 65504.0


class Linear(Protocol):
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out], float32; row t of the result depends on row t alone."""
        ...


class Float32Linear:
    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.weight, self.bias)


class PackedFloat16Linear:
    """float16 weights in fbgemm's packed order, float32 activations and sums."""

    __slots__ = ("_packed",)

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        if weight.abs().amax() > _LARGEST_FLOAT16:
            raise WeightFormatError(
                "a weight of this model is too large for float16; start with --dtype fp32"
            )
        self._packed = torch.ops.quantized.linear_prepack_fp16.default(weight, bias)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, torch.ops.quantized.linear_dynamic_fp16.default(rows, self._packed))


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, weight_format: WeightFormat) -> Linear:
    """A layer over `weight` float32 [out, in] and `bias` float32 [out]; may keep both."""
    return Float32Linear(weight, bias) if weight_format == "fp32" else PackedFloat16Linear(weight, bias)


def check_weight_format(name: str) -> WeightFormat:
    """`name` as given by `--dtype`; WeightFormatError if unknown or not available on this processor."""
    if name not in get_args(WeightFormat):
        raise WeightFormatError(f"--dtype must be one of {', '.join(get_args(WeightFormat))}, got {name!r}")
    if name == "fp16w" and "fbgemm" not in torch.backends.quantized.supported_engines:
        raise WeightFormatError(
            "this torch has no fbgemm for packed float16 weights; start with --dtype fp32"
        )
    return cast(WeightFormat, name)
