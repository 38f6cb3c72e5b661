"""Reads a Hugging Face config.json into a ModelConfig.

What the engine's own forward pass cannot compute becomes the architecture `transformers`.
"""

from model_files.config import Architecture, ModelConfig, RopeScaling
from model_files.errors import ModelFilesError
from model_files.fields import Fields
from model_files.fp8 import read_fp8_format

_ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_NO_LIMIT = 1 << 20
"""Positions of a model that states no limit."""
_ROPE_KINDS = ("default", "linear", "llama3")


def read_config(fields: Fields, eos_token_ids: tuple[int, ...] | None) -> ModelConfig:
    """`eos_token_ids` of the generation configuration win over the model's own.

    ModelFilesError names an option that nobody here can compute, or a number that is missing.
    """
    architecture = _architecture(fields)
    read_fp8_format(fields)  # refuses every other quantisation
    if eos_token_ids is None:
        eos_token_ids = tuple(fields.integers("eos_token_id")) if "eos_token_id" in fields else ()
    try:
        if architecture is None:
            return _foreign_config(fields, eos_token_ids)
        return _own_config(fields, architecture, eos_token_ids)
    except ValueError as error:
        raise ModelFilesError(f"{fields.source}: {error}; use an undamaged file") from None


def _own_config(fields: Fields, architecture: Architecture, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    has_bias = fields.flag("attention_bias", False) and architecture in ("llama", "qwen3")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // max(num_heads, 1)),
        intermediate_size=fields.integer("intermediate_size"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope_theta=_rope_theta(fields),
        rope_scaling=_rope_scaling(fields),
        sliding_window=fields.optional_integer("sliding_window") if architecture == "mistral" else None,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qk_norm=architecture == "qwen3",
        attention_bias=architecture == "qwen2" or has_bias,
        attention_output_bias=has_bias,
        mlp_bias=architecture == "llama" and fields.flag("mlp_bias", False),
        bos_token_id=fields.optional_integer("bos_token_id"),
        eos_token_ids=eos_token_ids,
    )


def _foreign_config(fields: Fields, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """What the scheduler, the proxy and the log need to know of a model that transformers computes."""
    text = fields.section("text_config") if "text_config" in fields else fields
    hidden_size, num_heads = text.integer("hidden_size"), text.integer("num_attention_heads", 1)
    head_dim = text.integer("head_dim", hidden_size // max(num_heads, 1))
    return ModelConfig(
        architecture="transformers",
        vocab_size=text.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=text.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=text.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        intermediate_size=text.integer("intermediate_size", 4 * hidden_size),
        max_position_embeddings=text.integer("max_position_embeddings", _NO_LIMIT),
        rms_norm_eps=text.number("rms_norm_eps", 1e-6),
        rope_theta=1.0,
        bos_token_id=text.optional_integer("bos_token_id"),
        eos_token_ids=eos_token_ids,
    )


def _architecture(fields: Fields) -> Architecture | None:
    """None: the own forward pass does not cover this model."""
    names = fields.texts("architectures")
    if len(names) != 1:
        raise ModelFilesError(
            f"{fields.source}: architectures should name one class, not {', '.join(names) or 'none'}; "
            "use a complete file of a language model"
        )
    own = _ARCHITECTURES.get(names[0])
    return own if own is not None and _is_covered(fields, own) else None


def _is_covered(fields: Fields, architecture: Architecture) -> bool:
    return (
        fields.text("hidden_act", "silu") == "silu"
        and fields.number("partial_rotary_factor", 1.0) == 1.0
        and (architecture == "mistral" or not fields.flag("use_sliding_window", False))
        and _is_rope_covered(fields)
    )


def _is_rope_covered(fields: Fields) -> bool:
    key = _rope_key(fields)
    if key not in fields:
        return True
    rope = fields.section(key)
    return _rope_kind(rope) in _ROPE_KINDS and rope.number("partial_rotary_factor", 1.0) == 1.0


def _rope_theta(fields: Fields) -> float:
    """transformers 5 writes rope_parameters, earlier ones rope_theta beside rope_scaling."""
    if "rope_parameters" in fields:
        return fields.section("rope_parameters").number("rope_theta", 10000.0)
    return fields.number("rope_theta", 10000.0)


def _rope_key(fields: Fields) -> str:
    return "rope_parameters" if "rope_parameters" in fields else "rope_scaling"


def _rope_kind(rope: Fields) -> str:
    return rope.text("rope_type", rope.text("type", "default"))


def _rope_scaling(fields: Fields) -> RopeScaling | None:
    key = _rope_key(fields)
    if key not in fields:
        return None
    rope = fields.section(key)
    kind = _rope_kind(rope)
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=rope.number("factor"))
    assert kind == "llama3", "the others are not covered"
    return RopeScaling(
        kind="llama3",
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
    )
