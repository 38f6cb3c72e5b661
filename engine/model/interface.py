"""What the model runner knows of a model."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.kv_pool import KVLayout, KVPool

Int32Array = npt.NDArray[np.int32]


class StepAttention(Protocol):
    """The attention of one step, planned once and run per layer."""

    def attend(self, pool: KVPool, layer: int, qkv: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Stores the new keys and values, then attends: qkv [T, (heads + 2 kv_heads) * D] -> [T, heads * D].

        `qkv` rows hold q, k, v of all heads in this order, already rotated.
        """
        ...


class AttentionBackend(Protocol):
    """One way to attend over the paged pool; each lives in a module `attention*.py`."""

    def plan(
        self,
        layout: KVLayout,
        *,
        slot_mapping: Int32Array,
        seqlens_q: Int32Array,
        seqlens_k: Int32Array,
        block_tables: Int32Array,
        sliding_window: int | None = None,
    ) -> StepAttention:
        """For a step whose sequences' tokens lie one after the other, in sequence order."""
        ...


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step: T tokens of N sequences, each sequence's tokens contiguous and in order."""

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]"""
    logit_rows: torch.Tensor
    """int64 [R], ascending: the rows whose logits are wanted, such as each sequence's last token."""
    attention: StepAttention


class DecoderModel(Protocol):
    def forward(self, inputs: StepInputs, pool: KVPool) -> torch.Tensor:
        """Writes the tokens' keys and values to the pool; logits float32 [R, vocab] of the `logit_rows`."""
        ...
