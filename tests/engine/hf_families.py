"""Tiny random checkpoints of the architectures that transformers computes for us."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from transformers.cache_utils import DynamicCache

from engine.hf.assembly import InjectedModel, inject
from engine.hf.runner import TransformersRunner
from engine.kv_pool import KVPool
from engine.model.linear import WeightFormat
from engine.state_pool import StatePool
from model_files import resolve_model
from tests.engine.builders import save_tiny_model
from tests.engine.pair import BLOCK_SIZE

NUM_SLOTS = 17
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_HYBRID = {"num_hidden_layers": 4, "num_attention_heads": 4, "initializer_range": 0.1}

STATEFUL: Mapping[str, tuple[str, dict[str, object]]] = {
    "lfm2": ("Lfm2", {**_HYBRID, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}),
    "qwen3_next": (
        "Qwen3Next",
        {**_HYBRID, **_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1},
    ),
    "qwen3_5": ("Qwen3_5", {**_HYBRID, **_LINEAR}),
}
COMPRESSED: Mapping[str, tuple[str, dict[str, object]]] = {
    "deepseek_v4": (
        "DeepseekV4",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "num_hidden_layers": 4,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 10},
            "sliding_window": 6,
            "q_lora_rank": 24,
            "o_groups": 2,
            "o_lora_rank": 8,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_topk": 64,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "hc_mult": 2,
            "initializer_range": 0.1,
        },
    ),
}
STATELESS: Mapping[str, tuple[str, dict[str, object]]] = {
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "decoder_sparse_step": 1, "initializer_range": 0.1}),
    "gemma3": (
        "Gemma3",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 7,
            "query_pre_attn_scalar": 16,
            "initializer_range": 0.1,
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 7,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "initializer_range": 0.1,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "initializer_range": 0.1,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 6,
            "initializer_range": 0.1,
        },
    ),
}
FAMILIES = {**STATEFUL, **COMPRESSED, **STATELESS}


@dataclass(frozen=True, slots=True)
class TinyForeign:
    """A checkpoint, what transformers makes of it, and what we make of it."""

    checkpoint: Path
    reference: transformers.PreTrainedModel
    injected: InjectedModel
    _generated: dict[tuple[tuple[int, ...], int], list[int]] = field(default_factory=dict)
    _logits: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def make(cls, path: Path, name: str, weight_format: WeightFormat = "fp32") -> "TinyForeign":
        return cls.save(path, *FAMILIES[name], weight_format)

    @classmethod
    def save(
        cls, path: Path, family: str, options: Mapping[str, object], weight_format: WeightFormat = "fp32"
    ) -> "TinyForeign":
        reference = save_tiny_model(path, family, **{"max_position_embeddings": 256, **options})
        return cls(path, reference, inject(resolve_model(str(path)), weight_format, BLOCK_SIZE))

    def runner(self, num_blocks: int, num_slots: int = NUM_SLOTS) -> TransformersRunner:
        shape = self.injected.shape
        states = None if shape.states is None else StatePool(shape.states, num_slots)
        return self.injected.runner(KVPool(shape.kv, num_blocks), states)

    @torch.inference_mode()
    def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Greedily, by transformers itself; computed once."""
        key = (tuple(prompt), num_tokens)
        if key not in self._generated:
            output = self.reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            self._generated[key] = output[0, len(prompt) :].tolist()
        return self._generated[key]

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """float32 [len(tokens), vocab], by one pass; computed once."""
        if tuple(tokens) not in self._logits:
            self._logits[tuple(tokens)] = self.reference(torch.tensor([tokens])).logits[0]
        return self._logits[tuple(tokens)]

    @torch.inference_mode()
    def continue_with(self, tokens: list[int], start: int, cache: DynamicCache) -> torch.Tensor:
        """float32 [vocab]: after these tokens behind those in transformers' own cache."""
        positions = torch.arange(start, start + len(tokens))[None]
        output = self.reference(torch.tensor([tokens]), position_ids=positions, cache=cache, use_cache=True)
        return output.logits[0, -1]
