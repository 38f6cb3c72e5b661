"""Reads a GGUF file: its metadata, its tensor table, and single tensors out of a memory map.

A reader of its own because `gguf.GGUFReader` makes numpy views of every one of a vocabulary's ~100,000
strings (4.5 s for SmolLM2 against 0.1 s here); type tables and dequantisation are the gguf package's.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from model_files.errors import ModelFilesError
from model_files.fields import Fields
from model_files.fingerprint import fingerprint, sample
from model_files.interface import Float32Array
from model_files.mapped_file import map_file

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_SCALARS = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: struct.Struct("<I"),
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.BOOL: struct.Struct("<?"),
    GGUFValueType.UINT64: struct.Struct("<Q"),
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}
_SMALLEST_STRING = 8
_SMALLEST_TENSOR_ENTRY = 8 + 4 + 4 + 8
_GROUPS_PER_ROW = 128
_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies; `shape` is in numpy's order, outermost first."""

    name: str
    shape: tuple[int, ...]
    quantisation: GGMLQuantizationType
    offset: int
    num_bytes: int


class GgufFile:
    """One open GGUF file. ModelFilesError for anything that is not a whole, well-formed file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path)
        try:
            cursor = _Cursor(self._map)
            num_tensors, num_fields = _read_preamble(cursor)
            self.fields = Fields(path.name, _read_metadata(cursor, num_fields))
            self.tensors = self._read_tensor_table(cursor, num_tensors)
        except (_DamagedError, UnicodeDecodeError) as error:
            raise ModelFilesError(
                f"{path} is not a complete GGUF file ({error}); download or convert it again"
            ) from None

    @property
    def revision(self) -> str:
        """Changes with the header and, but for luck, with the tensor data."""
        return fingerprint([sample(self._map, header_bytes=self._data_start)])

    def read(self, tensor: GgufTensor) -> Float32Array:
        """The tensor's values; a read-only view of the file when they are stored as float32."""
        stored = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        if tensor.quantisation == GGMLQuantizationType.F32:
            return stored.view(np.float32).reshape(tensor.shape)
        try:
            values: Float32Array = dequantize(_in_wide_rows(stored, tensor.quantisation), tensor.quantisation)
        except NotImplementedError:
            raise ModelFilesError(
                f"{self.path}: tensor {tensor.name} is stored as {tensor.quantisation.name}, which is not "
                "supported; use another file of this model, such as Q8_0, Q4_1 or F16"
            ) from None
        return values.reshape(tensor.shape)

    def _read_tensor_table(self, cursor: "_Cursor", num_tensors: int) -> dict[str, GgufTensor]:
        cursor.require_items(num_tensors, _SMALLEST_TENSOR_ENTRY, "tensors")
        entries = [_read_tensor_entry(cursor, self.path) for _ in range(num_tensors)]
        alignment = self.fields.integer("general.alignment", _DEFAULT_ALIGNMENT)
        if alignment <= 0 or alignment & (alignment - 1):
            raise _DamagedError(f"alignment {alignment} is no power of two")
        self._data_start = -(-cursor.offset // alignment) * alignment
        tensors = {}
        for entry in entries:
            tensor = _place(entry, self._data_start, len(self._map))
            if tensor.name in tensors:
                raise _DamagedError(f"tensor {tensor.name} appears twice")
            tensors[tensor.name] = tensor
        return tensors


class _DamagedError(Exception):
    """The bytes are no GGUF file, or only a part of one."""


class _Cursor:
    """Reads little-endian values from `offset` on and never past the end of `buffer`."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = buffer
        self.offset = 0

    def scalar(self, kind: struct.Struct) -> int | float | bool:
        self.require_items(1, kind.size, "bytes")
        (value,) = kind.unpack_from(self._buffer, self.offset)
        self.offset += kind.size
        return value  # type: ignore[no-any-return]

    def unsigned32(self) -> int:
        return int(self.scalar(_SCALARS[GGUFValueType.UINT32]))

    def unsigned64(self) -> int:
        return int(self.scalar(_SCALARS[GGUFValueType.UINT64]))

    def array(self, kind: struct.Struct, count: int) -> list[object]:
        self.require_items(count, kind.size, "array items")
        layout = f"<{count}{kind.format[1:]}"
        values = struct.unpack_from(layout, self._buffer, self.offset)
        self.offset += kind.size * count
        return list(values)

    def text(self) -> str:
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        self.require_items(count, _SMALLEST_STRING, "strings")
        unpack, buffer, size = _SCALARS[GGUFValueType.UINT64].unpack_from, self._buffer, len(self._buffer)
        texts, offset = [], self.offset
        for _ in range(count):
            if offset + _SMALLEST_STRING > size:
                raise _DamagedError("it ends inside a string")
            start = offset + _SMALLEST_STRING
            offset = start + unpack(buffer, offset)[0]
            if offset > size:
                raise _DamagedError("it ends inside a string")
            texts.append(str(buffer[start:offset], "utf-8"))
        self.offset = offset
        return texts

    def require_items(self, count: int, item_bytes: int, what: str) -> None:
        """Refuses counts that the rest of the file cannot hold, before anything is allocated for them."""
        if count * item_bytes > len(self._buffer) - self.offset:
            raise _DamagedError(f"it ends before its {count} {what}")


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    cursor.require_items(1, len(_MAGIC), "bytes")
    if cursor.unsigned32() != int.from_bytes(_MAGIC, "little"):
        raise _DamagedError("it does not start with GGUF")
    version = cursor.unsigned32()
    if version not in _VERSIONS:
        raise _DamagedError(f"version {version} or byte order is not supported, only little-endian 2 and 3")
    return cursor.unsigned64(), cursor.unsigned64()


def _read_metadata(cursor: _Cursor, num_fields: int) -> dict[str, object]:
    cursor.require_items(num_fields, _SMALLEST_STRING, "metadata fields")
    values: dict[str, object] = {}
    for _ in range(num_fields):
        key = cursor.text()
        values[key] = _read_value(cursor, _value_type(cursor))
    return values


def _value_type(cursor: _Cursor) -> GGUFValueType:
    code = cursor.unsigned32()
    try:
        return GGUFValueType(code)
    except ValueError:
        raise _DamagedError(f"metadata of unknown type {code}") from None


def _read_value(cursor: _Cursor, kind: GGUFValueType) -> object:
    if kind == GGUFValueType.STRING:
        return cursor.text()
    if kind != GGUFValueType.ARRAY:
        return cursor.scalar(_SCALARS[kind])
    item_kind, count = _value_type(cursor), cursor.unsigned64()
    if item_kind == GGUFValueType.STRING:
        return cursor.texts(count)
    if item_kind == GGUFValueType.ARRAY:
        raise _DamagedError("nested metadata arrays are not supported")
    return cursor.array(_SCALARS[item_kind], count)


def _read_tensor_entry(cursor: _Cursor, path: Path) -> GgufTensor:
    """One row of the tensor table; `offset` is still relative to the start of the tensor data."""
    name, num_dimensions = cursor.text(), cursor.unsigned32()
    if num_dimensions > _MAX_DIMENSIONS:
        raise _DamagedError(f"tensor {name} has {num_dimensions} dimensions")
    shape = tuple(cursor.unsigned64() for _ in range(num_dimensions))[::-1]
    quantisation, offset = _quantisation(cursor.unsigned32(), name, path), cursor.unsigned64()
    group_size, group_bytes = GGML_QUANT_SIZES[quantisation]
    if not shape or 0 in shape or shape[-1] % group_size:
        raise _DamagedError(f"tensor {name} of shape {shape} cannot hold groups of {group_size}")
    return GgufTensor(name, shape, quantisation, offset, math.prod(shape) // group_size * group_bytes)


def _quantisation(code: int, name: str, path: Path) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType(code)
    except ValueError:
        raise ModelFilesError(
            f"{path}: tensor {name} has the unknown quantisation type {code}; use another file of this "
            "model, such as Q8_0, Q4_1 or F16"
        ) from None


def _place(entry: GgufTensor, data_start: int, file_bytes: int) -> GgufTensor:
    start = data_start + entry.offset
    if start + entry.num_bytes > file_bytes:
        raise _DamagedError(f"it ends before the data of tensor {entry.name}")
    return GgufTensor(entry.name, entry.shape, entry.quantisation, start, entry.num_bytes)


def _in_wide_rows(stored: _Bytes, quantisation: GGMLQuantizationType) -> _Bytes:
    """Rows of up to 128 groups: the gguf package works on 16 rows at a time, so short ones cost calls.

    Groups are independent of each other, so any split into rows gives the same values.
    """
    group_bytes = GGML_QUANT_SIZES[quantisation][1]
    num_groups = stored.size // group_bytes
    return stored.reshape(-1, math.gcd(num_groups, _GROUPS_PER_ROW) * group_bytes)
