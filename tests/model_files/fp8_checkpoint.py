"""Makes fp8 checkpoints out of tiny ones in float32."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BLOCK = 32


def quantise(path: Path) -> dict[str, torch.Tensor]:
    """Makes an fp8 checkpoint of one in float32; returns the numbers it holds from then on."""
    stored, meant = {}, {}
    for name, weight in load_file(path / "model.safetensors").items():
        stored[name] = meant[name] = weight
        if "proj" in name and weight.ndim == 2:
            scales = block_scales(weight)
            expanded = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            expanded = expanded[: weight.shape[0], : weight.shape[1]]
            stored[name] = (weight / expanded).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales
            meant[name] = stored[name].float() * expanded
    save_file(stored, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (path / "config.json").write_text(json.dumps(config))
    return meant


def block_scales(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded.view(rows, BLOCK, columns, BLOCK).abs().amax((1, 3)) / 448
