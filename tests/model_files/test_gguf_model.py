from pathlib import Path

import numpy as np
import pytest

from model_files import EMBEDDED_MODEL, ModelConfig, ModelFilesError, RopeScaling, resolve_model
from tests.model_files.builders import (
    CHAT_TEMPLATE,
    HEAD_DIM,
    HIDDEN,
    NUM_HEADS,
    NUM_KV_HEADS,
    TOKENS,
    Float32Array,
    random_weights,
    write_gguf,
)


def test_the_embedded_model_is_smollm2() -> None:
    files = resolve_model(EMBEDDED_MODEL)
    assert files.name == "smollm2-135m-instruct"
    assert files.config() == ModelConfig(
        architecture="llama",
        vocab_size=49152,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    assert files.special_tokens() == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert "<|im_start|>assistant" in (files.chat_template() or "")
    assert len(files.weights().names()) == 2 + 30 * 9


def test_a_gguf_file_is_named_after_itself(tmp_path: Path) -> None:
    files = resolve_model(str(write_gguf(tmp_path / "my-model.gguf")))
    assert files.name == "my-model"
    assert files.chat_template() == CHAT_TEMPLATE
    assert files.special_tokens() == {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    assert files.config().eos_token_ids == (0,)
    assert files.config().vocab_size == len(TOKENS)


def interleaved(rows: Float32Array, num_heads: int) -> Float32Array:
    """What a converter to GGUF does to q and k of a llama: rows i and i + d/2 of a head become neighbours."""
    heads = rows.reshape(num_heads, -1, rows.shape[-1])
    half = heads.shape[1] // 2
    result = np.empty_like(heads)
    result[:, 0::2], result[:, 1::2] = heads[:, :half], heads[:, half:]
    return result.reshape(rows.shape)


@pytest.mark.parametrize(("architecture", "is_interleaved"), [("llama", True), ("qwen2", False)])
def test_weights_come_under_their_hugging_face_names_and_in_their_order(
    tmp_path: Path, architecture: str, is_interleaved: bool
) -> None:
    original = random_weights()
    stored = dict(original)
    if is_interleaved:
        for layer in range(2):
            for part, num_heads in (("q", NUM_HEADS), ("k", NUM_KV_HEADS)):
                name = f"blk.{layer}.attn_{part}.weight"
                stored[name] = interleaved(original[name], num_heads)
    path = write_gguf(tmp_path / "model.gguf", architecture=architecture, weights=stored)
    weights = resolve_model(str(path)).weights()
    expected = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.1.input_layernorm.weight": "blk.1.attn_norm.weight",
        "model.layers.1.self_attn.q_proj.weight": "blk.1.attn_q.weight",
        "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
    }
    assert expected.keys() <= set(weights.names())
    for name, stored_name in expected.items():
        assert np.array_equal(weights.get(name), original[stored_name]), name


def test_the_flags_of_the_family_are_read_off_the_tensors(tmp_path: Path) -> None:
    weights = random_weights()
    weights["output.weight"] = weights["token_embd.weight"]
    for name, rows in (("attn_q", NUM_HEADS), ("attn_k", NUM_KV_HEADS), ("attn_v", NUM_KV_HEADS)):
        weights[f"blk.0.{name}.bias"] = np.ones(rows * HEAD_DIM, np.float32)
    weights["blk.0.attn_q_norm.weight"] = np.ones(HEAD_DIM, np.float32)
    config = resolve_model(
        str(write_gguf(tmp_path / "m.gguf", architecture="qwen3", weights=weights))
    ).config()
    assert not config.tie_word_embeddings
    assert config.attention_bias
    assert not config.attention_output_bias
    assert config.qk_norm


def test_rotary_factors_of_a_converted_llama3_are_kept(tmp_path: Path) -> None:
    weights = random_weights() | {"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}
    files = resolve_model(str(write_gguf(tmp_path / "m.gguf", weights=weights)))
    assert files.config().rope_scaling == RopeScaling(
        kind="factors", factors=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
    )
    assert "rope_freqs.weight" not in files.weights().names()


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", architecture="mamba")
    with pytest.raises(ModelFilesError, match="architecture 'mamba' is not supported; use one of llama"):
        resolve_model(str(path))


def test_a_tensor_that_no_supported_architecture_has_is_refused_by_name(tmp_path: Path) -> None:
    weights = random_weights() | {"blk.0.ffn_gate_inp.weight": np.ones((8, HIDDEN), np.float32)}
    files = resolve_model(str(write_gguf(tmp_path / "m.gguf", weights=weights)))
    with pytest.raises(ModelFilesError, match=r"blk\.0\.ffn_gate_inp\.weight"):
        files.weights()


def test_a_missing_tensor_is_refused_by_name(tmp_path: Path) -> None:
    files = resolve_model(str(write_gguf(tmp_path / "m.gguf")))
    with pytest.raises(ModelFilesError, match=r"has no tensor lm_head\.weight; use a complete file"):
        files.weights().get("lm_head.weight")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.attention.key_length", 15, "head_dim must be even, got 15"),
        ("llama.rope.dimension_count", 8, "partial rotary embeddings are not supported"),
    ],
)
def test_numbers_that_cannot_be_are_refused(tmp_path: Path, key: str, value: int, message: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", extra_uint32={key: value})
    with pytest.raises(ModelFilesError, match=message):
        resolve_model(str(path))
