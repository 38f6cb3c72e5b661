import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from model_files import ModelFilesError
from model_files.safetensors_file import SafetensorsFile

VALUES = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([1.5], np.float16)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(VALUES, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def with_header(path: Path, header: object, data: bytes = bytes(64)) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_tensors_are_read_as_float32(path: Path) -> None:
    file = SafetensorsFile(path)
    assert sorted(file.names()) == ["a", "b"]
    for name, values in VALUES.items():
        assert file.get(name).dtype == np.float32
        assert np.array_equal(file.get(name), values)


def test_every_proper_prefix_is_refused(path: Path) -> None:
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ModelFilesError, match="download or convert it again"):
            SafetensorsFile(path)


@settings(max_examples=300)
@given(position=st.integers(0, 10_000), damage=st.binary(min_size=1, max_size=4))
def test_damage_is_refused_or_harmless(path: Path, position: int, damage: bytes) -> None:
    content = bytearray(path.read_bytes())
    position %= len(content)
    content[position : position + len(damage)] = damage
    damaged = path.with_name("damaged.safetensors")
    damaged.write_bytes(content)
    with contextlib.suppress(ModelFilesError):
        file = SafetensorsFile(damaged)
        for name in file.names():
            file.get(name)


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {},
        {"dtype": "F32", "shape": [2], "data_offsets": [0]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2.5], "data_offsets": [0, 10]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [60, 68]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
    ],
)
def test_a_contradictory_header_is_refused(tmp_path: Path, entry: object) -> None:
    with pytest.raises(ModelFilesError, match="is not a complete safetensors file"):
        SafetensorsFile(with_header(tmp_path / "m.safetensors", {"x": entry}))


def test_an_unsupported_type_is_named_when_it_is_read(tmp_path: Path) -> None:
    entry = {"dtype": "F8_E5M2", "shape": [8], "data_offsets": [0, 8]}
    file = SafetensorsFile(with_header(tmp_path / "m.safetensors", {"x": entry}))
    with pytest.raises(ModelFilesError, match=r"tensor x is stored as F8_E5M2.*unquantised checkpoint"):
        file.get("x")
