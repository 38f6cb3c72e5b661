"""Checkpoints with 8-bit floating-point weights: a scale for each rectangle of a matrix, beside it.

Weights are stored as float8 e4m3 under their names, scales under `<name>_scale_inv`; the number that was
meant is their product (DeepSeek-V3's format, `quant_method` fp8).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from model_files.errors import ModelFilesError
from model_files.fields import Fields
from model_files.interface import Float32Array

SCALE_SUFFIX = "_scale_inv"
_DEFAULT_BLOCK = (128, 128)


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """`block_size`: rows and columns that share a scale; None: one scale for the whole tensor."""

    block_size: tuple[int, int] | None = _DEFAULT_BLOCK


def read_fp8_format(fields: Fields) -> Fp8Format | None:
    """None for plain weights; `ModelFilesError` names a quantisation that is not supported."""
    if "quantization_config" not in fields:
        return None
    quantisation = fields.section("quantization_config")
    method = quantisation.text("quant_method", "unknown")
    if method != "fp8":
        raise ModelFilesError(
            f"{fields.source}: quantisation {method!r} is not supported; use an unquantised or fp8 checkpoint"
        )
    if "weight_block_size" not in quantisation:
        return Fp8Format(None)
    size = quantisation.integers("weight_block_size")
    if len(size) != 2 or min(size) < 1:
        raise ModelFilesError(f"{quantisation.source}: weight_block_size should be two sizes, not {size}")
    return Fp8Format((size[0], size[1]))


def decode_e4m3(stored: npt.NDArray[np.uint8]) -> Float32Array:
    return _VALUES[stored]


def dequantise(weight: Float32Array, scales: Float32Array, fp8: Fp8Format) -> Float32Array:
    """weight [..., rows, columns] times its scales [..., rows / block, columns / block], rounded up.

    `ValueError` if the shapes do not fit each other.
    """
    if fp8.block_size is None or scales.size == 1:
        return weight * scales.reshape(())
    rows, columns = weight.shape[-2:]
    expected = (*weight.shape[:-2], -(-rows // fp8.block_size[0]), -(-columns // fp8.block_size[1]))
    if scales.shape != expected:
        raise ValueError(f"scales of shape {scales.shape}, not {expected}")
    by_row = np.repeat(scales, fp8.block_size[0], axis=-2)[..., :rows, :]
    return weight * np.repeat(by_row, fp8.block_size[1], axis=-1)[..., :columns]


def _e4m3_values() -> Float32Array:
    """What each of the 256 bytes stands for: sign, 4 bits of exponent (bias 7), 3 bits of fraction."""
    codes = np.arange(256)
    exponents, fractions = (codes >> 3) & 15, codes & 7
    magnitudes = np.where(
        exponents == 0, fractions * 2.0**-9, (8 + fractions) * np.exp2(exponents.astype(np.float64) - 10)
    )
    magnitudes[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -magnitudes, magnitudes).astype(np.float32)


_VALUES = _e4m3_values()
