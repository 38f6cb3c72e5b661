"""Greedy answers of the transformers package in fp32, to compare ours with."""

import warnings
from functools import lru_cache

import torch
import transformers

from model_files.interface import ModelFiles


def reference_generate(model_files: ModelFiles, prompt_ids: list[int], max_new_tokens: int) -> list[int]:
    """The tokens `transformers.generate` appends, an end-of-sequence token included.

    Only for models of the llama architecture; built from `model_files`' own dequantised weights.
    """
    model = reference_model(model_files)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = model.generate(
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=list(model_files.config().eos_token_ids),
            pad_token_id=0,
        )
    return output[0, len(prompt_ids) :].tolist()


def first_difference(model_files: ModelFiles, prompt_ids: list[int], output_ids: list[int]) -> int | None:
    """Index of the first output token that fp32 transformers would not have chosen; None if all agree.

    One forward pass over prompt and output: some fifty times faster than `reference_generate`, and by
    induction the same statement for the tokens given (it does not say that the output is long enough).
    """
    with torch.inference_mode():
        logits = reference_model(model_files)(torch.tensor([prompt_ids + output_ids])).logits[0]
    chosen = logits[len(prompt_ids) - 1 : -1].argmax(dim=-1).tolist()
    pairs = enumerate(zip(chosen, output_ids, strict=True))
    return next((index for index, (expected, actual) in pairs if expected != actual), None)


def reference_model(model_files: ModelFiles) -> transformers.LlamaForCausalLM:
    return _cached_model(model_files.revision, _Hashable(model_files))


class _Hashable:
    """Carries model files past lru_cache, which only the revision before it shall distinguish."""

    def __init__(self, model_files: ModelFiles) -> None:
        self.model_files = model_files

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashable)

    def __hash__(self) -> int:
        return 0


@lru_cache(maxsize=2)
def _cached_model(_revision: str, carrier: _Hashable) -> transformers.LlamaForCausalLM:
    config, weights = carrier.model_files.config(), carrier.model_files.weights()
    assert config.architecture == "llama"
    assert config.rope_scaling is None
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rms_norm_eps=config.rms_norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
                tie_word_embeddings=config.tie_word_embeddings,
                attention_bias=config.attention_bias,
                mlp_bias=config.mlp_bias,
            )
        )
    tensors = {name: torch.from_numpy(weights.get(name).copy()) for name in weights.names()}
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffers were on the meta device
    return model.eval()
