"""Builds a model from a checkpoint: fuses, reorders and packs its weights, several layers at a time."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from engine.model.linear import Linear, WeightFormat, make_linear
from engine.model.llama import LlamaLayer, LlamaModel, LlamaWeights
from engine.model.rotary import pairs_from_halves, rotary_table
from engine.model.shards import (
    WHOLE,
    Collectives,
    GatheredHead,
    Shard,
    SummedLinear,
    local_config,
    vocabulary_part,
)
from model_files import ModelConfig, ModelFiles, ModelFilesError, Weights

MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]
"""A layer over a weight float32 [out, in] and a bias float32 [out]; may keep both."""


def load_model(
    files: ModelFiles,
    weight_format: WeightFormat,
    *,
    max_positions: int,
    num_threads: int | None = None,
    shard: Shard = WHOLE,
    collectives: Collectives | None = None,
) -> LlamaModel:
    """The model of `files` that torch computes; as `load_weights`."""

    def make(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return make_linear(weight, bias, weight_format)

    weights = load_weights(
        files,
        make,
        max_positions=max_positions,
        num_threads=num_threads,
        shard=shard,
        collectives=collectives,
    )
    return LlamaModel(local_config(files.config(), shard), weights)


def load_weights(
    files: ModelFiles,
    make: MakeLinear,
    *,
    max_positions: int,
    num_threads: int | None = None,
    shard: Shard = WHOLE,
    collectives: Collectives | None = None,
) -> LlamaWeights:
    """The weights of `files` for positions below `max_positions`; None threads takes one per usable core.

    `shard`: the part of it that this rank computes; more than one rank need `collectives`.

    ModelFilesError names a tensor that is missing or of another shape than the configuration says.
    """
    config = files.config()
    loader = LayerLoader(config, files.weights(), make, shard, collectives)
    with ThreadPoolExecutor(
        num_threads or len(os.sched_getaffinity(0))
    ) as threads:  # reading and packing release the GIL
        head = threads.submit(loader.head)
        layers = tuple(threads.map(loader.layer, range(config.num_layers)))
        return LlamaWeights(
            embedding=loader.embedding,
            rotations=rotary_table(config, max_positions),
            layers=layers,
            final_norm=loader.tensor("model.norm.weight", config.hidden_size),
            head=head.result(),
        )


class LayerLoader:
    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        make: MakeLinear,
        shard: Shard,
        collectives: Collectives | None,
    ) -> None:
        if config.num_layers > len(weights.names()):
            raise ModelFilesError(
                f"the model's configuration says {config.num_layers} layers, but there are "
                f"{len(weights.names())} tensors; use files that belong together"
            )
        self._config = config
        self._weights = weights
        self._make = make
        self._shard = shard
        self._collectives = collectives
        self.embedding = self.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """The named tensor, checked to be of `shape`, in memory that may be kept and changed."""
        values = self._weights.get(name)
        if values.shape != shape:
            raise ModelFilesError(
                f"tensor {name} has shape {values.shape}, but the model's configuration says {shape}; "
                "use files that belong together"
            )
        return torch.from_numpy(values if values.flags.writeable else np.array(values))

    def head(self) -> Linear:
        config = self._config
        weight = self.embedding
        if not config.tie_word_embeddings:
            weight = self.tensor("lm_head.weight", config.vocab_size, config.hidden_size)
        if self._collectives is None:
            return self._make(weight, None)
        part = self._make(vocabulary_part(weight, self._shard), None)
        return GatheredHead(part, config.vocab_size, self._collectives)

    def layer(self, index: int) -> LlamaLayer:
        config, prefix = self._config, f"model.layers.{index}"
        return LlamaLayer(
            input_norm=self.tensor(f"{prefix}.input_layernorm.weight", config.hidden_size),
            qkv=self._qkv(f"{prefix}.self_attn"),
            qk_norm=self._qk_norm(f"{prefix}.self_attn") if config.qk_norm else None,
            output=self._summed(
                f"{prefix}.self_attn.o_proj",
                config.hidden_size,
                config.num_heads * config.head_dim,
                bias=config.attention_output_bias,
            ),
            mlp_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight", config.hidden_size),
            gate_up=self._gate_up(f"{prefix}.mlp"),
            down=self._summed(
                f"{prefix}.mlp.down_proj", config.hidden_size, config.intermediate_size, bias=config.mlp_bias
            ),
        )

    def _summed(self, name: str, num_outputs: int, num_inputs: int, *, bias: bool) -> Linear:
        """A layer whose inputs are what this rank has computed of the layer before; rank 0 adds the bias."""
        weight = self.tensor(f"{name}.weight", num_outputs, num_inputs)
        weight = weight[:, self._shard.part(num_inputs)].contiguous()
        offset = self.tensor(f"{name}.bias", num_outputs) if bias and self._shard.rank == 0 else None
        linear = self._make(weight, offset)
        return linear if self._collectives is None else SummedLinear(linear, self._collectives)

    def _qkv(self, prefix: str) -> Linear:
        weight = self._stack_qkv(prefix, "weight", self._config.hidden_size)
        bias = self._stack_qkv(prefix, "bias") if self._config.attention_bias else None
        return self._make(weight, bias)

    def _stack_qkv(self, prefix: str, kind: str, *columns: int) -> torch.Tensor:
        config = self._config
        num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        heads = self._shard.kv_heads(config.num_kv_heads)
        kv = slice(heads.start * config.head_dim, heads.stop * config.head_dim)
        q = self.tensor(f"{prefix}.q_proj.{kind}", num_q, *columns)[self._shard.part(num_q)]
        k = self.tensor(f"{prefix}.k_proj.{kind}", num_kv, *columns)[kv]
        v = self.tensor(f"{prefix}.v_proj.{kind}", num_kv, *columns)[kv]
        return torch.cat((pairs_from_halves(q, config.head_dim), pairs_from_halves(k, config.head_dim), v))

    def _qk_norm(self, prefix: str) -> torch.Tensor:
        config = local_config(self._config, self._shard)
        q = pairs_from_halves(self.tensor(f"{prefix}.q_norm.weight", config.head_dim), config.head_dim)
        k = pairs_from_halves(self.tensor(f"{prefix}.k_norm.weight", config.head_dim), config.head_dim)
        return torch.cat((q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)))

    def _gate_up(self, prefix: str) -> Linear:
        config = self._config
        shape = (config.intermediate_size, config.hidden_size)
        names = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
        ours = self._shard.part(config.intermediate_size)
        weight = torch.cat([self.tensor(f"{name}.weight", *shape)[ours] for name in names])
        bias = None
        if config.mlp_bias:
            biases = [self.tensor(f"{name}.bias", config.intermediate_size) for name in names]
            bias = torch.cat([each[ours] for each in biases])
        return self._make(weight, bias)
