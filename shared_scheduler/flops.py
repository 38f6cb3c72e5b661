"""Floating-point work of a step, for utilisation in the log. It never influences a decision."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared_scheduler.outputs import SchedulerOutputs
from shared_scheduler.rows import Int32Array

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the count depends on. `num_active_experts` gated MLPs of `intermediate_size` run per token."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_active_experts: int = 1
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Multiply and add counted as two."""

    attention: float
    total: float


class FlopsEstimator:
    """Turns the q and k of a step into FLOPs of causal attention and of the whole model."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        queries = shape.num_heads * shape.head_dim
        projections = shape.hidden_size * (2 * queries + 2 * shape.num_kv_heads * shape.head_dim)
        mlp = 3 * shape.hidden_size * shape.intermediate_size * shape.num_active_experts
        self._per_token = 2.0 * shape.num_layers * (projections + mlp)
        self._per_logits = 2.0 * shape.hidden_size * shape.vocab_size
        self._per_pair = 4.0 * shape.num_layers * queries

    def of_step(self, outputs: SchedulerOutputs) -> StepFlops:
        if outputs.batch is None:
            return StepFlops(0.0, 0.0)
        return self.of_lengths(outputs.seqlens_q, outputs.batch.seqlens_k, is_prompt=outputs.prompt_run)

    def of_lengths(self, seqlens_q: Int32Array, seqlens_k: Int32Array, *, is_prompt: bool) -> StepFlops:
        """A prompt step needs logits of the last token of each sequence only."""
        q, k = seqlens_q.astype(np.float64), seqlens_k.astype(np.float64)
        attention = self._per_pair * float(self._num_pairs(q, k).sum())
        num_logits = q.size if is_prompt else q.sum()
        total = attention + self._per_token * float(q.sum()) + self._per_logits * float(num_logits)
        return StepFlops(attention, total)

    def _num_pairs(self, q: Floats, k: Floats) -> Floats:
        """(query, key) pairs of the last q of k positions under a causal mask and the window, if any."""
        pairs = _triangle(k) - _triangle(k - q)
        window = self._shape.sliding_window
        if window is not None:
            pairs -= _triangle(np.maximum(k - window, 0)) - _triangle(np.maximum(k - q - window, 0))
        return pairs


def _triangle(n: Floats) -> Floats:
    return np.multiply(n, n + 1) / 2
