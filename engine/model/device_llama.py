"""The Llama family on a device: one number format for weights, activations and KV.

The same weights and flags as `llama`, without the in-place tricks that pay on a CPU. Nothing here looks at a
tensor's values from the host, so a decode step can be captured in a graph.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.kv_pool import KVPool
from engine.model.interface import StepInputs
from model_files import ModelConfig


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    """Weights of one layer; rows of q and k are in pair order (see rotary)."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    """[num_heads + num_kv_heads, head_dim]"""
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    embedding: torch.Tensor
    rotations: torch.Tensor
    """float32 [2, max positions, head_dim / 2]: cosines, sines"""
    layers: tuple[DeviceLayer, ...]
    final_norm: torch.Tensor
    head: torch.Tensor


class DeviceLlama:
    """DecoderModel of the Llama family on a device."""

    def __init__(self, config: ModelConfig, weights: DeviceWeights) -> None:
        self.config = config
        self._weights = weights

    @property
    def num_weight_bytes(self) -> int:
        """What a decode step reads of the weights; of the embedding it reads some rows."""
        weights, layers = self._weights, self._weights.layers
        tensors = [weights.final_norm, weights.head]
        tensors += [t for layer in layers for t in _tensors(layer) if t is not None]
        return sum(tensor.nbytes for tensor in tensors)

    def forward(self, inputs: StepInputs, pool: KVPool) -> torch.Tensor:
        weights = self._weights
        hidden = F.embedding(inputs.token_ids, weights.embedding)
        cosines, sines = weights.rotations[:, inputs.positions].unsqueeze(2)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            qkv = F.linear(self._norm(hidden, layer.input_norm), layer.qkv, layer.qkv_bias)
            qkv = self._rotated(layer, qkv, cosines, sines)
            attended = inputs.attention.attend(pool, index, qkv, self.config.num_heads)
            if index == last:  # nothing reads the other rows any more
                attended, hidden = attended[inputs.logit_rows], hidden[inputs.logit_rows]
            hidden = hidden + F.linear(attended, layer.output, layer.output_bias)
            hidden = hidden + self._mlp(layer, self._norm(hidden, layer.mlp_norm))
        return F.linear(self._norm(hidden, weights.final_norm), weights.head).float()

    def _rotated(
        self, layer: DeviceLayer, qkv: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
    ) -> torch.Tensor:
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        width = num_rotated * config.head_dim
        heads = qkv[:, :width].view(-1, num_rotated, config.head_dim)
        if layer.qk_norm is not None:
            heads = F.rms_norm(heads, (config.head_dim,), None, config.rms_norm_eps) * layer.qk_norm
        first, second = heads.float().view(*heads.shape[:2], -1, 2).unbind(-1)
        turned = torch.stack((first * cosines - second * sines, first * sines + second * cosines), dim=-1)
        return torch.cat((turned.flatten(1).to(qkv.dtype), qkv[:, width:]), dim=1)

    def _mlp(self, layer: DeviceLayer, rows: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(rows, layer.gate_up, layer.gate_up_bias).chunk(2, dim=1)
        return F.linear(F.silu(gate) * up, layer.down, layer.down_bias)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.config.rms_norm_eps)


def _tensors(layer: DeviceLayer) -> tuple[torch.Tensor | None, ...]:
    return (
        layer.input_norm,
        layer.qkv,
        layer.qkv_bias,
        layer.qk_norm,
        layer.output,
        layer.output_bias,
        layer.mlp_norm,
        layer.gate_up,
        layer.gate_up_bias,
        layer.down,
        layer.down_bias,
    )


def device_rotations(rotations: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A `rotary_table` as this model wants it."""
    return torch.stack((rotations.real, rotations.imag)).contiguous().to(device)


def random_weights(
    config: ModelConfig, rotations: torch.Tensor, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> DeviceWeights:
    """Weights of the right shapes and no meaning, drawn on the device: nothing is read or copied."""
    source = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        numbers = torch.randn(rows, columns, generator=source, device=device, dtype=dtype)
        return numbers.mul_(columns**-0.5)

    def ones(width: int) -> torch.Tensor:
        return torch.ones(width, device=device, dtype=dtype)

    hidden, head_dim = config.hidden_size, config.head_dim
    num_rotated = config.num_heads + config.num_kv_heads

    def layer() -> DeviceLayer:
        return DeviceLayer(
            input_norm=ones(hidden),
            qkv=matrix((num_rotated + config.num_kv_heads) * head_dim, hidden),
            qkv_bias=None,
            qk_norm=ones(num_rotated * head_dim).view(num_rotated, head_dim) if config.qk_norm else None,
            output=matrix(hidden, config.num_heads * head_dim),
            output_bias=None,
            mlp_norm=ones(hidden),
            gate_up=matrix(2 * config.intermediate_size, hidden),
            gate_up_bias=None,
            down=matrix(hidden, config.intermediate_size),
            down_bias=None,
        )

    embedding = matrix(config.vocab_size, hidden)
    return DeviceWeights(
        embedding=embedding,
        rotations=device_rotations(rotations, device),
        layers=tuple(layer() for _ in range(config.num_layers)),
        final_norm=ones(hidden),
        head=embedding if config.tie_word_embeddings else matrix(config.vocab_size, hidden),
    )
