"""Draws tokens where the logits are: one copy to the device, one back, nothing else that waits for it.

Steps with logit edits (penalties, biases, structures) or log-probabilities are drawn on the host, from a copy
of their logits: the same answers, at the price of that copy.
"""

import numpy as np
import torch

from engine.errors import ModelOutputError
from engine.logit_edits import LogitEdits
from engine.noise import uniform_noise
from engine.sampler import NO_LOGPROBS, SampledTokens, Sampler, SamplingRows

_NOT_FINITE = -1


class DeviceSampler(Sampler):
    """As `Sampler`, from logits on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, rows: SamplingRows, edits: LogitEdits | None = None
    ) -> SampledTokens:
        assert len(rows) == len(logits)
        if edits is not None or (rows.num_logprobs != NO_LOGPROBS).any():
            # A copy in any case: the logits may be a graph's own memory, and edits change them.
            return super().sample(logits.to("cpu", copy=True), rows, edits)
        largest, token_ids = logits.max(dim=-1)
        if (rows.temperature > 0).any():
            parameters = self._parameters(rows)
            drawn = _draw(logits, largest, parameters, is_filtered=_has_filters(rows))
            token_ids = torch.where(parameters[0] > 0, drawn, token_ids)
        ids = torch.where(torch.isfinite(largest), token_ids, _NOT_FINITE).to("cpu").numpy()
        bad = np.flatnonzero(ids == _NOT_FINITE).tolist()
        if bad:
            raise ModelOutputError(
                f"the model's logits are not finite in rows {bad}; its weights may be damaged"
            )
        return SampledTokens(ids, None)

    def _parameters(self, rows: SamplingRows) -> torch.Tensor:
        """float64 [5, N]: temperature, top-k, top-p, min-p, noise."""
        noise = uniform_noise(rows.seed, rows.output_index)
        table = np.stack((rows.temperature, rows.top_k, rows.top_p, rows.min_p, noise)).astype(np.float64)
        return torch.from_numpy(table).to(self._device, non_blocking=True)


def _has_filters(rows: SamplingRows) -> bool:
    return bool((rows.top_k > 0).any() or (rows.top_p < 1).any())


def _draw(
    logits: torch.Tensor, largest: torch.Tensor, parameters: torch.Tensor, *, is_filtered: bool
) -> torch.Tensor:
    """A token for every row; those of greedy rows mean nothing."""
    temperature, top_k, top_p, min_p, noise = parameters[:, :, None]
    scale = torch.where(temperature > 0, temperature, 1.0).float()
    weights = (logits - largest[:, None]).div_(scale).exp_()
    weights.masked_fill_(weights < min_p.float(), 0.0)
    if is_filtered:
        weights.masked_fill_(weights < _thresholds(weights, top_k.long(), top_p), 0.0)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    return torch.searchsorted(cumulative, noise * cumulative[:, -1:], right=True).squeeze(-1)


def _thresholds(weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest weight each row keeps, [N, 1]: that of its nucleus within its top-k."""
    ordered = weights.sort(dim=-1, descending=True).values
    masses = ordered.cumsum(dim=-1, dtype=torch.float64)
    size = weights.shape[1]
    last = torch.where(top_k > 0, top_k.clamp(max=size), size) - 1
    within = torch.searchsorted(masses, masses.gather(1, last) * top_p)
    return ordered.gather(1, torch.minimum(within, last))
