"""How each token of a step is drawn, as arrays; rebuilt only when the batch gets other members."""

from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np

from engine.choices import FirstDraws
from engine.sampler import NO_LOGPROBS, Int32Array, SamplingRows
from shared_scheduler import Batch, Cohort
from wire.sampling import SamplingParams


class DrawRows:
    """The rows of one step at a time, for steps in launch order."""

    def __init__(self) -> None:
        self._cohort: Cohort | None = None
        self._rows = sampling_rows((), np.empty(0, np.int32))

    def of(self, cohort: Cohort, batch: Batch, draws: FirstDraws) -> SamplingRows:
        """One row per sequence, and behind them those of `draws`; with drafts, one per token of the batch."""
        if draws.sampling:
            params = tuple(sequence.sampling for sequence in cohort.sequences) + draws.sampling
            first = np.zeros(len(draws.sampling), np.int32)
            return sampling_rows(params, np.append(batch.output_indices, first))
        if cohort is not self._cohort:
            self._cohort = cohort
            params = tuple(sequence.sampling for sequence in cohort.sequences)
            self._rows = sampling_rows(params, batch.output_indices)
        if not batch.has_drafts:
            return replace(self._rows, output_index=batch.output_indices)
        owners = np.repeat(np.arange(batch.num_sequences), batch.seqlens_q)
        return self._rows.take(owners, batch.output_indices[owners] + batch.places)


def sampling_rows(params: Items[SamplingParams], output_indices: Int32Array) -> SamplingRows:
    """How to draw one token per entry of `params`."""
    return SamplingRows(
        temperature=np.array([p.temperature for p in params], np.float32),
        top_k=np.array([p.top_k for p in params], np.int32),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        seed=np.array([p.seed for p in params], np.int64),
        output_index=output_indices,
        num_logprobs=np.array([NO_LOGPROBS if p.logprobs is None else p.logprobs for p in params], np.int32),
    )
