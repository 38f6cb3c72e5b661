"""fp8 checkpoints are dequantised on load: the numbers that torch would make of them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from model_files import ModelFilesError, resolve_model
from model_files.fp8 import Fp8Format, decode_e4m3, dequantise
from tests.engine.builders import save_tiny_model
from tests.model_files.fp8_checkpoint import quantise


def test_every_byte_is_decoded_as_torch_does() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(decode_e4m3(codes), expected, equal_nan=True)


def test_scales_cover_rectangles_and_a_rest_at_the_edges() -> None:
    weight = np.ones((5, 4), np.float32)
    scales = np.array([[1, 2], [3, 4]], np.float32)
    assert dequantise(weight, scales, Fp8Format((3, 2))).tolist() == [[1, 1, 2, 2]] * 3 + [[3, 3, 4, 4]] * 2
    assert dequantise(weight, np.array([7], np.float32), Fp8Format(None)).tolist() == [[7] * 4] * 5
    with pytest.raises(ValueError, match=r"shape \(1, 2\), not \(2, 2\)"):
        dequantise(weight, scales[:1], Fp8Format((3, 2)))


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_weights_come_out_as_the_numbers_that_were_meant(tmp_path: Path, family: str) -> None:
    save_tiny_model(tmp_path, family)
    meant = quantise(tmp_path)
    files = resolve_model(str(tmp_path))
    assert files.config().architecture == family.lower()
    assert set(files.weights().names()) == meant.keys()
    for name, values in meant.items():
        assert np.array_equal(files.weights().get(name), values.numpy()), name


def test_scales_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "Llama")
    quantise(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [8, 8]
    (tmp_path / "config.json").write_text(json.dumps(config))
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(ModelFilesError, match=f"tensor {name} has scales of shape"):
        resolve_model(str(tmp_path)).weights().get(name)


@pytest.mark.parametrize("size", [[128], [0, 128], "x"])
def test_a_block_size_that_cannot_be_is_refused(tmp_path: Path, size: object) -> None:
    save_tiny_model(tmp_path, "Llama")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": size}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFilesError, match="weight_block_size should be"):
        resolve_model(str(tmp_path))
