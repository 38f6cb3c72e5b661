"""What the model runner knows of a model."""

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.kv_pool import KVPool
from engine.model.attention import AttentionPlan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step: T tokens of N sequences, each sequence's tokens contiguous and in order."""

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]"""
    logit_rows: torch.Tensor
    """int64 [R], ascending: the rows whose logits are wanted, such as each sequence's last token."""
    attention: AttentionPlan


class DecoderModel(Protocol):
    def forward(self, inputs: StepInputs, pool: KVPool) -> torch.Tensor:
        """Writes the tokens' keys and values to the pool; logits float32 [R, vocab] of the `logit_rows`."""
        ...
