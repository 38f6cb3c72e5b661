"""Reads tensors out of a memory-mapped .safetensors file, as float32.

A reader of its own because the safetensors package cannot give bfloat16 to numpy.
Format: https://github.com/huggingface/safetensors#format
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from model_files.errors import ModelFilesError
from model_files.fingerprint import sample
from model_files.fp8 import decode_e4m3
from model_files.interface import Float32Array, IntegerArray
from model_files.mapped_file import map_file

_LENGTH_BYTES = 8
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}
_INTEGERS = {"I64": "<i8", "I32": "<i4"}


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    offset: int


class SafetensorsFile:
    """One open file. ModelFilesError for anything that is not a whole, well-formed file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path)
        self._data_start = _LENGTH_BYTES + int.from_bytes(self._map[:_LENGTH_BYTES], "little")
        if len(self._map) < _LENGTH_BYTES or self._data_start > len(self._map):
            raise self._damaged("it ends inside its header")
        self._entries = {name: self._entry(name, raw) for name, raw in self._header().items()}

    def names(self) -> list[str]:
        return list(self._entries)

    def sample(self) -> bytes:
        return sample(self._map, header_bytes=self._data_start)

    def get(self, name: str) -> Float32Array:
        """The tensor's values; a read-only view of the file when they are stored as float32."""
        entry = self._entries[name]
        if entry.dtype not in _ITEM_BYTES:
            raise ModelFilesError(
                f"{self.path}: tensor {name} is stored as {entry.dtype}, not as one of "
                f"{', '.join(_ITEM_BYTES)}; use an unquantised checkpoint of this model"
            )
        if entry.dtype == "F8_E4M3":
            codes = np.frombuffer(self._map, np.uint8, math.prod(entry.shape), entry.offset)
            return decode_e4m3(codes).reshape(entry.shape)
        stored = np.dtype(f"<{'u2' if entry.dtype == 'BF16' else 'f' + str(_ITEM_BYTES[entry.dtype])}")
        values = np.frombuffer(self._map, stored, math.prod(entry.shape), entry.offset).reshape(entry.shape)
        if entry.dtype == "BF16":  # the upper half of a float32
            return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return values.astype(np.float32, copy=False)

    def get_integers(self, name: str) -> IntegerArray | None:
        """A tensor stored as integers; None for any other."""
        entry = self._entries[name]
        if entry.dtype not in _INTEGERS:
            return None
        stored = np.dtype(_INTEGERS[entry.dtype])
        return np.frombuffer(self._map, stored, math.prod(entry.shape), entry.offset).reshape(entry.shape)

    def _header(self) -> dict[str, object]:
        try:
            header = json.loads(self._map[_LENGTH_BYTES : self._data_start])
        except (ValueError, RecursionError):
            raise self._damaged("its header is not JSON") from None
        if not isinstance(header, dict):
            raise self._damaged("its header is not an object")
        header.pop("__metadata__", None)
        return header

    def _entry(self, name: str, raw: object) -> _Entry:
        match raw:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
                pass
            case _:
                raise self._damaged(f"tensor {name} is not described")
        if not all(type(size) is int and size >= 0 for size in shape):
            raise self._damaged(f"tensor {name} has no valid shape")
        if not 0 <= start <= end <= len(self._map) - self._data_start:
            raise self._damaged(f"it ends before the data of tensor {name}")
        item_bytes = {**_ITEM_BYTES, "I64": 8, "I32": 4}.get(dtype)
        if item_bytes and end - start != math.prod(shape) * item_bytes:
            raise self._damaged(f"tensor {name} and its shape differ in size")
        return _Entry(dtype, tuple(shape), self._data_start + start)

    def _damaged(self, reason: str) -> ModelFilesError:
        return ModelFilesError(
            f"{self.path} is not a complete safetensors file ({reason}); download or convert it again"
        )
