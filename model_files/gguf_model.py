"""A model in one GGUF file: configuration, tokenizer and weights under their Hugging Face names."""

from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from model_files.config import Architecture, ModelConfig, RopeScaling
from model_files.errors import ModelFilesError
from model_files.fields import Fields
from model_files.gguf_file import GgufFile
from model_files.gguf_tokenizer import build_tokenizer
from model_files.interface import Float32Array, IntegerArray

_ARCHITECTURES: dict[str, Architecture] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_ROPE_FACTORS = "rope_freqs.weight"
_END_TOKENS = ("eos", "eot", "eom")
_SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufModel:
    """ModelFiles of one GGUF file, shown to clients as `name`."""

    def __init__(self, path: Path, name: str) -> None:
        self._file = GgufFile(path)
        self.name = name
        self.config()

    @cached_property
    def revision(self) -> str:
        return self._file.revision

    def config(self) -> ModelConfig:
        return self._config

    def source_config(self) -> Mapping[str, object]:
        return {}

    def tokenizer(self) -> Tokenizer:
        return build_tokenizer(self._file.fields)

    def chat_template(self) -> str | None:
        return self._file.fields.optional_text("tokenizer.chat_template")

    def special_tokens(self) -> dict[str, str]:
        fields, tokens = self._file.fields, self._file.fields.texts("tokenizer.ggml.tokens")
        ids = {name: fields.integer(key) for name, key in _SPECIAL_TOKENS.items() if key in fields}
        return {name: tokens[token_id] for name, token_id in ids.items() if 0 <= token_id < len(tokens)}

    def weights(self) -> "GgufWeights":
        return GgufWeights(self._file, self._config)

    @cached_property
    def _config(self) -> ModelConfig:
        try:
            return _read_config(self._file)
        except ValueError as error:
            raise ModelFilesError(f"{self._file.path}: {error}; use an undamaged file") from None


class GgufWeights:
    """Weights of one GGUF file."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        stored_names = (name for name in file.tensors if name != _ROPE_FACTORS)
        self._stored_names = {_hf_name(name, file.path): name for name in stored_names}

    def names(self) -> Collection[str]:
        return self._stored_names.keys()

    def get_integers(self, name: str) -> IntegerArray | None:
        return None

    def get(self, name: str) -> Float32Array:
        if name not in self._stored_names:
            raise ModelFilesError(f"{self._file.path} has no tensor {name}; use a complete file")
        values = self._file.read(self._file.tensors[self._stored_names[name]])
        num_heads = self._num_interleaved_heads(name)
        return values if num_heads is None else _halves_from_pairs(values, num_heads, name)

    def _num_interleaved_heads(self, name: str) -> int | None:
        """GGUF files of the llama architecture keep the rotary dimensions of q and k as adjacent pairs."""
        if self._config.architecture != "llama":
            return None
        if ".self_attn.q_proj." in name:
            return self._config.num_heads
        return self._config.num_kv_heads if ".self_attn.k_proj." in name else None


def _halves_from_pairs(values: Float32Array, num_heads: int, name: str) -> Float32Array:
    """Row 2i of each head becomes row i, row 2i + 1 becomes row i + head_dim / 2."""
    if values.shape[0] % (2 * num_heads):
        raise ModelFilesError(f"tensor {name} has {values.shape[0]} rows for {num_heads} heads; damaged file")
    pairs = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _hf_name(stored_name: str, path: Path) -> str:
    stem, _, kind = stored_name.rpartition(".")
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{kind}"
    prefix, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if prefix == "blk" and part in _LAYER_NAMES:
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    raise ModelFilesError(
        f"{path}: tensor {stored_name} belongs to an architecture that is not supported; "
        f"supported are {', '.join(_ARCHITECTURES)} without experts"
    )


def _read_config(file: GgufFile) -> ModelConfig:
    fields, stored = file.fields, file.fields.text("general.architecture")
    if stored not in _ARCHITECTURES:
        raise ModelFilesError(
            f"{file.path}: architecture {stored!r} is not supported; use one of {', '.join(_ARCHITECTURES)}"
        )
    num_heads = fields.integer(f"{stored}.attention.head_count")
    hidden_size = fields.integer(f"{stored}.embedding_length")
    head_dim = fields.integer(f"{stored}.attention.key_length", hidden_size // max(num_heads, 1))
    if fields.integer(f"{stored}.rope.dimension_count", head_dim) != head_dim:
        raise ModelFilesError(
            f"{file.path}: partial rotary embeddings are not supported; choose another model"
        )
    return ModelConfig(
        architecture=_ARCHITECTURES[stored],
        vocab_size=fields.integer(f"{stored}.vocab_size", len(fields.texts("tokenizer.ggml.tokens"))),
        hidden_size=hidden_size,
        num_layers=fields.integer(f"{stored}.block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer(f"{stored}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer(f"{stored}.feed_forward_length"),
        max_position_embeddings=fields.integer(f"{stored}.context_length"),
        rms_norm_eps=_shortest(fields.number(f"{stored}.attention.layer_norm_rms_epsilon")),
        rope_theta=fields.number(f"{stored}.rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(file, stored),
        sliding_window=fields.optional_integer(f"{stored}.attention.sliding_window"),
        tie_word_embeddings="output.weight" not in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        bos_token_id=fields.optional_integer("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_end_token_ids(fields),
    )


def _shortest(value: float) -> float:
    """The decimal number behind a stored float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _end_token_ids(fields: Fields) -> tuple[int, ...]:
    ids = (fields.optional_integer(f"tokenizer.ggml.{kind}_token_id") for kind in _END_TOKENS)
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _rope_scaling(file: GgufFile, stored: str) -> RopeScaling | None:
    if _ROPE_FACTORS in file.tensors:
        factors = file.read(file.tensors[_ROPE_FACTORS])
        return RopeScaling(kind="factors", factors=tuple(factors.ravel().tolist()))
    kind = file.fields.text(f"{stored}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=file.fields.number(f"{stored}.rope.scaling.factor"))
    raise ModelFilesError(f"{file.path}: rope scaling {kind!r} is not supported; choose another model")
