"""Small model files, made on the spot."""

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import quantize

Float32Array = npt.NDArray[np.float32]

TOKENS = ["<|end|>", "<|start|>", *(chr(code) for code in range(ord("!"), ord("~") + 1)), "Ġ", "ab", "abc"]
MERGES = ["a b", "ab c"]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, MLP, NUM_LAYERS = 64, 4, 2, 16, 96, 2


def random_weights(seed: int = 0) -> dict[str, Float32Array]:
    """A llama of 2 layers under its GGUF names."""
    generator = np.random.default_rng(seed)

    def normal(*shape: int) -> Float32Array:
        return generator.normal(0, 0.3, shape).astype(np.float32)

    weights = {"token_embd.weight": normal(len(TOKENS), HIDDEN), "output_norm.weight": normal(HIDDEN)}
    for layer in range(NUM_LAYERS):
        weights |= {
            f"blk.{layer}.attn_norm.weight": normal(HIDDEN),
            f"blk.{layer}.attn_q.weight": normal(NUM_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_k.weight": normal(NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_v.weight": normal(NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_output.weight": normal(HIDDEN, NUM_HEADS * HEAD_DIM),
            f"blk.{layer}.ffn_norm.weight": normal(HIDDEN),
            f"blk.{layer}.ffn_gate.weight": normal(MLP, HIDDEN),
            f"blk.{layer}.ffn_up.weight": normal(MLP, HIDDEN),
            f"blk.{layer}.ffn_down.weight": normal(HIDDEN, MLP),
        }
    return weights


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    weights: dict[str, Float32Array] | None = None,
    quantisations: dict[str, gguf.GGMLQuantizationType] | None = None,
    pre: str = "smollm",
    tokenizer_model: str = "gpt2",
    extra_uint32: dict[str, int] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model(tokenizer_model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_token_types([3, 3, *[1] * (len(TOKENS) - 2)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, value in (extra_uint32 or {}).items():
        writer.add_uint32(key, value)
    for name, values in (random_weights() if weights is None else weights).items():
        kind = (quantisations or {}).get(name, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
