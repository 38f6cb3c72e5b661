"""Reads a Hugging Face config.json into a ModelConfig, refusing what the engine cannot compute."""

from model_files.config import Architecture, ModelConfig, RopeScaling
from model_files.errors import ModelFilesError
from model_files.fields import Fields

_ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def read_config(fields: Fields, eos_token_ids: tuple[int, ...] | None) -> ModelConfig:
    """`eos_token_ids` of the generation configuration win over the model's own.

    ModelFilesError names the architecture or option that is not supported.
    """
    architecture = _architecture(fields)
    _refuse_unsupported(fields, architecture)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    has_bias = fields.flag("attention_bias", False) and architecture in ("llama", "qwen3")
    if eos_token_ids is None:
        eos_token_ids = tuple(fields.integers("eos_token_id")) if "eos_token_id" in fields else ()
    try:
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
    except ValueError as error:
        raise ModelFilesError(f"{fields.source}: {error}; use an undamaged file") from None


def _architecture(fields: Fields) -> Architecture:
    names = fields.texts("architectures")
    if len(names) == 1 and names[0] in _ARCHITECTURES:
        return _ARCHITECTURES[names[0]]
    raise ModelFilesError(
        f"{fields.source}: architecture {', '.join(names) or 'none'} is not supported; "
        f"use a model of {', '.join(_ARCHITECTURES)}"
    )


def _refuse_unsupported(fields: Fields, architecture: Architecture) -> None:
    if "quantization_config" in fields:
        method = fields.section("quantization_config").text("quant_method", "unknown")
        raise _unsupported(fields, f"quantisation {method!r}", "an unquantised checkpoint")
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise _unsupported(fields, f"hidden_act {activation!r}", "another model")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise _unsupported(fields, "partial_rotary_factor", "another model")
    if architecture != "mistral" and fields.flag("use_sliding_window", False):
        raise _unsupported(fields, "use_sliding_window", "another model")


def _rope_theta(fields: Fields) -> float:
    """transformers 5 writes rope_parameters, earlier ones rope_theta beside rope_scaling."""
    if "rope_parameters" in fields:
        return fields.section("rope_parameters").number("rope_theta", 10000.0)
    return fields.number("rope_theta", 10000.0)


def _rope_scaling(fields: Fields) -> RopeScaling | None:
    key = "rope_parameters" if "rope_parameters" in fields else "rope_scaling"
    if key not in fields:
        return None
    rope = fields.section(key)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise _unsupported(fields, "partial_rotary_factor", "another model")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=rope.number("factor"))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        )
    raise _unsupported(fields, f"rope type {kind!r}", "another model")


def _unsupported(fields: Fields, what: str, instead: str) -> ModelFilesError:
    return ModelFilesError(f"{fields.source}: {what} is not supported; use {instead}")
