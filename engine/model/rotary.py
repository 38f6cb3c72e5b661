"""Rotary position embeddings over adjacent pairs of dimensions.

Checkpoints rotate dimension i together with i + head_dim/2. The rows of q and k are reordered once at
load so that the two are neighbours: a rotation is then one complex multiplication in place, and scores
do not change because q and k are reordered alike.
"""

import math

import torch

from model_files import ModelConfig, RopeScaling


def rotary_table(config: ModelConfig, num_positions: int) -> torch.Tensor:
    """complex64 [num_positions, head_dim / 2]: the rotation of each pair at each position."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = _scaled(1.0 / config.rope_theta**exponents, config.rope_scaling)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.complex(angles.cos(), angles.sin())


def pairs_from_halves(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorders dim 0 (heads x head_dim): row i of each head to 2i, row i + head_dim/2 to 2i + 1."""
    halves = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def rotate_(heads: torch.Tensor, rotations: torch.Tensor) -> None:
    """In place: heads float32 [T, num_heads, head_dim] by rotations complex64 [T, 1, head_dim / 2]."""
    num_tokens, num_heads, head_dim = heads.shape
    torch.view_as_complex(heads.view(num_tokens, num_heads, head_dim // 2, 2)).mul_(rotations)


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling | None) -> torch.Tensor:
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors, dtype=torch.float32)
    return _llama3_scaled(frequencies, scaling)


def _llama3_scaled(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept_share = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - kept_share) * frequencies / scaling.factor + kept_share * frequencies
