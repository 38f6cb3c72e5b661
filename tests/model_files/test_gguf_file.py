import contextlib
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from model_files import ModelFilesError, resolve_model
from model_files.gguf_file import GgufFile
from tests.model_files.builders import TOKENS, random_weights, write_gguf

Kind = gguf.GGMLQuantizationType
GATE = "blk.0.ffn_gate.weight"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf")


def test_metadata_and_tensors_are_those_that_the_gguf_package_reads(small: Path) -> None:
    ours, theirs = GgufFile(small), gguf.GGUFReader(small)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.fields.raw(key) == field.contents()
    assert ours.tensors.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        entry = ours.tensors[tensor.name]
        assert (entry.offset, entry.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert np.array_equal(ours.read(entry), tensor.data)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_tensors_are_dequantised(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    path = write_gguf(tmp_path / "quantised.gguf", quantisations={GATE: kind})
    file = GgufFile(path)
    original = random_weights()[GATE]
    values = file.read(file.tensors[GATE])
    assert values.dtype == np.float32
    assert np.array_equal(values, dequantize(quantize(original, kind), kind))
    assert np.abs(values - original).max() < 0.2


def test_prefixes_of_a_file_are_refused_in_one_line(small: Path, tmp_path: Path) -> None:
    content, path = small.read_bytes(), tmp_path / "prefix.gguf"
    header_bytes = min(tensor.offset for tensor in GgufFile(small).tensors.values())
    lengths = [*range(0, header_bytes + 50, 3), *range(header_bytes, len(content), 997), len(content) - 1]
    for length in lengths:
        path.write_bytes(content[:length])
        with pytest.raises(ModelFilesError) as caught:
            resolve_model(str(path))
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


@settings(max_examples=400)
@given(st.data())
def test_damage_in_the_header_is_refused_or_harmless(
    small: Path, tmp_path: Path, data: st.DataObject
) -> None:
    content, path = bytearray(small.read_bytes()), tmp_path / "damaged.gguf"
    header_bytes = min(tensor.offset for tensor in GgufFile(small).tensors.values())
    position = data.draw(st.integers(0, header_bytes - 1))
    damage = data.draw(st.binary(min_size=1, max_size=8))
    content[position : position + len(damage)] = damage
    path.write_bytes(content)
    with contextlib.suppress(ModelFilesError):
        model = resolve_model(str(path))
        model.tokenizer()
        model.special_tokens()
        weights = model.weights()
        for name in weights.names():
            weights.get(name)


@pytest.mark.parametrize("at", ["tensors", "fields", "tokens"])
def test_an_absurd_count_is_refused_before_memory_is_taken(small: Path, tmp_path: Path, at: str) -> None:
    content, path = bytearray(small.read_bytes()), tmp_path / "absurd.gguf"
    offset = {"tensors": 8, "fields": 16}.get(at)
    if offset is None:
        offset = content.index(struct.pack("<IQ", 8, len(TOKENS))) + 4
    content[offset : offset + 8] = struct.pack("<Q", 2**62)
    path.write_bytes(content)
    with pytest.raises(ModelFilesError, match="is not a complete GGUF file"):
        GgufFile(path)


def test_an_unknown_quantisation_type_is_named(small: Path, tmp_path: Path) -> None:
    content, path = bytearray(small.read_bytes()), tmp_path / "unknown.gguf"
    entry = content.index(GATE.encode()) + len(GATE)
    content[entry + 4 + 16 : entry + 4 + 16 + 4] = struct.pack("<I", 999)
    path.write_bytes(content)
    with pytest.raises(ModelFilesError, match=rf"{GATE} has the unknown quantisation type 999; use another"):
        GgufFile(path)


def test_a_type_that_cannot_be_dequantised_is_named_when_it_is_read(small: Path, tmp_path: Path) -> None:
    content, path = bytearray(small.read_bytes()), tmp_path / "integers.gguf"
    entry = content.index(GATE.encode()) + len(GATE)
    content[entry + 4 + 16 : entry + 4 + 16 + 4] = struct.pack("<I", Kind.I8)
    path.write_bytes(content)
    file = GgufFile(path)
    with pytest.raises(ModelFilesError, match=r"stored as I8, which is not supported; use another file"):
        file.read(file.tensors[GATE])


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04 a zip file, for example", b"GGUF\x00\x00\x00\x03" + bytes(64)]
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFilesError, match="download or convert it again"):
        GgufFile(path)


def test_the_revision_follows_the_content_not_the_place(small: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(small.read_bytes())
    other = write_gguf(tmp_path / "other.gguf", weights=random_weights(seed=1))
    assert GgufFile(copy).revision == GgufFile(small).revision
    assert GgufFile(other).revision != GgufFile(small).revision
