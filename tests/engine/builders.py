"""Batches and tiny models for the tests of the engine's model part."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import transformers

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepOf:
    """Part of one sequence: its tokens from `start` on are computed in this step."""

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    state_slot: int = 0


@dataclass(frozen=True, slots=True)
class TestBatch:
    """The arrays a model runner takes."""

    __test__ = False

    token_ids: Int32Array
    positions: Int32Array
    slot_mapping: Int32Array
    seqlens_q: Int32Array
    seqlens_k: Int32Array
    block_tables: Int32Array
    state_slots: Int32Array


def batch_of(*steps: StepOf, block_size: int) -> TestBatch:
    tokens, positions, slots = [], [], []
    tables = np.zeros((len(steps), max(len(step.block_table) for step in steps)), np.int32)
    for row, step in enumerate(steps):
        computed = range(step.start, len(step.token_ids))
        tokens += step.token_ids[step.start :]
        positions += computed
        slots += [step.block_table[p // block_size] * block_size + p % block_size for p in computed]
        tables[row, : len(step.block_table)] = step.block_table
    return TestBatch(
        token_ids=np.array(tokens, np.int32),
        positions=np.array(positions, np.int32),
        slot_mapping=np.array(slots, np.int32),
        seqlens_q=np.array([len(step.token_ids) - step.start for step in steps], np.int32),
        seqlens_k=np.array([len(step.token_ids) for step in steps], np.int32),
        block_tables=tables,
        state_slots=np.array([step.state_slot for step in steps], np.int32),
    )


TINY = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_tiny_model(
    path: Path,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    seed: int = 1,
    **options: object,
) -> transformers.PreTrainedModel:
    """A random checkpoint of a family such as `Llama`, in Hugging Face layout; biases are random too."""
    model_class = getattr(transformers, f"{family}ForCausalLM")
    config = model_class.config_class(**{**TINY, **options})
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model = model.to(dtype)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return model
