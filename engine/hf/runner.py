"""Runs a transformers model on the batches that the scheduler lays out."""

import numpy as np
import torch
from transformers import PreTrainedModel

from engine.hf.cache import make_cache, running_cache
from engine.hf.parts import StateBatch, StepPart, split_step
from engine.hf.shapes import CacheShape
from engine.kv_pool import KVPool
from engine.model_runner import IntArray
from engine.state_pool import StatePool
from model_files import ModelConfig


class TransformersRunner:
    """One model with injected attention over a KV pool and, where it keeps states, a state pool."""

    kernels = "torch"

    def __init__(
        self,
        model: PreTrainedModel,
        config: ModelConfig,
        shape: CacheShape,
        kv_pool: KVPool,
        states: StatePool | None,
    ) -> None:
        self._model = model
        self._shape = shape
        self._cache = make_cache(shape, kv_pool, states)
        self.config = config
        self.kv_pool = kv_pool
        self.kv_shards: tuple[KVPool, ...] = (kv_pool,)
        self.states = states
        self.sliding_window = shape.common_window

    @torch.inference_mode()
    def forward(self, batch: StateBatch, logit_rows: IntArray | None = None) -> torch.Tensor:
        """Logits float32 [R, vocab] of these of the T tokens; what the model keeps of all goes to the pools.

        `logit_rows` [R], ascending; None: each sequence's last token.
        """
        if logit_rows is None:
            logit_rows = np.cumsum(batch.seqlens_q) - 1
        logits = torch.empty(logit_rows.size, self.config.vocab_size)
        for part in split_step(
            batch, self.kv_pool.layout, self._shape.windows, one_by_one=self._shape.v4 is not None
        ):
            places = np.flatnonzero(np.isin(logit_rows, part.rows))
            in_part = np.searchsorted(part.rows, logit_rows[places])
            logits[torch.from_numpy(places)] = self._run(part, torch.from_numpy(in_part))
        return logits

    def _run(self, part: StepPart, wanted: torch.Tensor) -> torch.Tensor:
        """Logits [len(wanted), vocab] of these of the part's tokens."""
        is_decode = part.token_ids.shape[1] == 1
        self._cache.begin(part)
        token = running_cache.set(self._cache)
        try:
            output = self._model(
                input_ids=part.token_ids,
                position_ids=part.positions,
                cache=self._cache,
                use_cache=True,
                logits_to_keep=1 if is_decode else wanted,
            )
        finally:
            running_cache.reset(token)
        self._cache.finish()
        logits: torch.Tensor = output.logits
        return logits[wanted, 0] if is_decode else logits[0]
