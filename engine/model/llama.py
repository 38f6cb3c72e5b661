"""A compact forward pass for decoders of the Llama family: Llama, Mistral, Qwen2, Qwen3.

They differ by flags of ModelConfig: biases, normalised queries and keys, tied embeddings, rotary scaling.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.kv_pool import KVPool
from engine.model.interface import StepInputs
from engine.model.linear import Linear
from engine.model.rotary import rotate_
from model_files import ModelConfig


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """Weights of one layer; rows of q and k are in pair order (see rotary)."""

    input_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    """float32 [num_heads + num_kv_heads, head_dim]"""
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    embedding: torch.Tensor
    """float32 [vocab, hidden]"""
    rotations: torch.Tensor
    """complex64 [max positions, head_dim / 2]"""
    layers: tuple[LlamaLayer, ...]
    final_norm: torch.Tensor
    head: Linear


class LlamaModel:
    """DecoderModel of the Llama family."""

    def __init__(self, config: ModelConfig, weights: LlamaWeights) -> None:
        self.config = config
        self._weights = weights

    def forward(self, inputs: StepInputs, pool: KVPool) -> torch.Tensor:
        weights = self._weights
        hidden = F.embedding(inputs.token_ids, weights.embedding)
        rotations = weights.rotations[inputs.positions].unsqueeze(1)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            attended = self._attention(index, layer, hidden, rotations, inputs, pool)
            if index == last:  # nothing reads the other rows any more
                attended, hidden = attended[inputs.logit_rows], hidden[inputs.logit_rows]
            hidden.add_(layer.output(attended))
            hidden.add_(self._mlp(layer, hidden))
        return weights.head(self._norm(hidden, weights.final_norm))

    def _attention(
        self,
        index: int,
        layer: LlamaLayer,
        hidden: torch.Tensor,
        rotations: torch.Tensor,
        inputs: StepInputs,
        pool: KVPool,
    ) -> torch.Tensor:
        config = self.config
        qkv = layer.qkv(self._norm(hidden, layer.input_norm))
        num_rotated = config.num_heads + config.num_kv_heads
        rotated = qkv[:, : num_rotated * config.head_dim].view(-1, num_rotated, config.head_dim)
        if layer.qk_norm is not None:
            rotated.copy_(
                F.rms_norm(rotated, (config.head_dim,), None, config.rms_norm_eps).mul_(layer.qk_norm)
            )
        rotate_(rotated, rotations)
        return inputs.attention.attend(pool, index, qkv, config.num_heads)

    def _mlp(self, layer: LlamaLayer, hidden: torch.Tensor) -> torch.Tensor:
        gate_up = layer.gate_up(self._norm(hidden, layer.mlp_norm))
        gate, up = gate_up.chunk(2, dim=1)
        return layer.down(F.silu(gate).mul_(up))

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.config.rms_norm_eps)
