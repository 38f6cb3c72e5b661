"""The numbers that describe a decoder, wherever they were read."""

from dataclasses import dataclass
from typing import Literal

Architecture = Literal["llama", "mistral", "qwen2", "qwen3", "transformers"]
"""`transformers`: none that the engine computes by itself; the transformers package may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How the rotary frequencies differ from theta^(-2i/d).

    `linear` divides them by `factor`; `llama3` divides the low ones only, with a smooth transition;
    `factors` divides each by its own entry (one per pair of dimensions, from a GGUF's rope_freqs).
    """

    kind: Literal["linear", "llama3", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """`ValueError` names the first number that cannot be."""
        if not self.factor > 0 or not all(factor > 0 for factor in self.factors):
            raise ValueError("the rope scaling factors must be positive")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} and high_freq_factor {self.high_freq_factor} "
                "must be positive and in this order"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and flags of one decoder; sizes are numbers of elements.

    Of an architecture `transformers`, flags and rotary settings say nothing.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    """Each token sees at most this many tokens, itself included."""
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    """The q, k and v projections have biases."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """`ValueError` names the first number that cannot be."""
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if (
            self.rope_scaling
            and self.rope_scaling.factors
            and len(self.rope_scaling.factors) * 2 != self.head_dim
        ):
            raise ValueError(
                f"head_dim {self.head_dim} does not fit {len(self.rope_scaling.factors)} rope scaling factors"
            )


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
)
