"""Draws one token per row of logits, for all rows of a step together.

Order of operations: edits of the logits (`engine/logit_edits.py`), temperature, min-p, top-k, then top-p over
what is left. Tokens that tie with the
last one kept are kept too, so the candidates do not depend on a sort's order. The draw inverts the
cumulative distribution in vocabulary order at one uniform number that depends on (seed, output index)
alone: equal logits give equal tokens in any batch, on any engine.

Edits may leave nothing to draw, as where a grammar has run into a dead end. Such a row takes the token that
the model itself finds most probable and is named: whoever asked decides what becomes of the sequence.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import ModelOutputError
from engine.logit_edits import LogitEdits
from engine.noise import uniform_noise
from wire.services import TokenLogprobs

NO_LOGPROBS = -1
_NUCLEUS_CANDIDATES = 512
"""Most nuclei are smaller than this; the others pay for a full sort."""

_BLOCK = 128
"""Tokens whose weights are summed up first."""

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How to draw each of N tokens; one entry per row of logits."""

    temperature: Float32Array
    """0 is greedy."""
    top_k: Int32Array
    """0 is no limit."""
    top_p: Float32Array
    min_p: Float32Array
    """0 is no limit."""
    seed: Int64Array
    output_index: Int32Array
    """Index of the token to draw among its request's output tokens."""
    num_logprobs: Int32Array
    """Alternatives to report; NO_LOGPROBS reports nothing."""

    def __len__(self) -> int:
        return len(self.temperature)

    def take(self, rows: npt.NDArray[np.integer], output_index: Int32Array) -> "SamplingRows":
        """These rows, perhaps some of them several times, drawing these output tokens."""
        return SamplingRows(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.seed[rows],
            output_index,
            self.num_logprobs[rows],
        )


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Natural-log probabilities, of the distribution before temperature and filters."""

    chosen: Float32Array
    """[N], NaN where none were asked for."""
    top_ids: Int32Array
    """[N, K], most probable first; K is the largest number asked for."""
    top_logprobs: Float32Array
    """[N, K]"""
    num_logprobs: Int32Array

    def rows(self, start: int, end: int) -> list[TokenLogprobs | None]:
        return [self.row(index) for index in range(start, end)]

    def row(self, index: int) -> TokenLogprobs | None:
        num_top = int(self.num_logprobs[index])
        if num_top == NO_LOGPROBS:
            return None
        return TokenLogprobs(
            logprob=float(self.chosen[index]),
            top_token_ids=tuple(self.top_ids[index, :num_top].tolist()),
            top_logprobs=tuple(self.top_logprobs[index, :num_top].tolist()),
        )


@dataclass(frozen=True, slots=True)
class SampledTokens:
    token_ids: Int64Array
    logprobs: SampledLogprobs | None
    """None when no row asked for them."""
    dead_ends: tuple[int, ...] = ()
    """Rows in which the edits have left no token to draw."""


class Sampler:
    """Stateless: everything a draw depends on comes in with the rows."""

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, rows: SamplingRows, edits: LogitEdits | None = None
    ) -> SampledTokens:
        """One token per row of logits float32 [N, vocab], which `edits` may change.

        ModelOutputError if any are not numbers.
        """
        assert len(rows) == len(logits)
        largest, token_ids = logits.max(dim=-1)
        if not torch.isfinite(largest).all():
            bad = torch.nonzero(~torch.isfinite(largest)).flatten().tolist()
            raise ModelOutputError(
                f"the model's logits are not finite in rows {bad}; its weights may be damaged"
            )
        reported = np.flatnonzero(rows.num_logprobs != NO_LOGPROBS)
        unedited = logits[torch.from_numpy(reported)] if len(reported) else None
        can_draw, dead_ends = np.ones(len(rows), bool), tuple[int, ...]()
        if edits is not None:
            edits.apply_(logits)
            edited = torch.from_numpy(edits.rows())
            largest[edited], best_ids = logits[edited].max(dim=-1)
            can_draw = torch.isfinite(largest).numpy()
            dead_ends = tuple(np.flatnonzero(~can_draw).tolist())
            token_ids[edited] = torch.where(torch.isfinite(largest[edited]), best_ids, token_ids[edited])
        drawn = np.flatnonzero((rows.temperature > 0) & can_draw)
        if len(drawn):
            index = torch.from_numpy(drawn)
            candidates = logits if len(drawn) == len(rows) else logits[index]
            token_ids[index] = _draw(candidates - largest[index, None], rows, drawn)
        if unedited is None:
            return SampledTokens(token_ids.numpy(), None, dead_ends)
        logprobs = _logprobs(unedited, reported, token_ids, rows.num_logprobs)
        return SampledTokens(token_ids.numpy(), logprobs, dead_ends)


def _draw(logits: torch.Tensor, rows: SamplingRows, drawn: npt.NDArray[np.intp]) -> torch.Tensor:
    """Token ids [M] from logits [M, vocab], which are at most 0 and are overwritten."""
    weights = logits.div_(torch.from_numpy(rows.temperature[drawn])[:, None]).exp_()
    min_p = rows.min_p[drawn]
    if min_p.any():
        limited = torch.from_numpy(np.flatnonzero(min_p))
        some = weights[limited]
        weights[limited] = some.masked_fill_(some < torch.from_numpy(min_p)[limited, None], 0.0)
    _filter(weights, rows.top_k[drawn], rows.top_p[drawn])
    return _pick(weights, torch.from_numpy(uniform_noise(rows.seed[drawn], rows.output_index[drawn])))


def _pick(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Where the running sum of each row of `weights` [M, vocab] passes the share `noise` [M] of its total.

    First among the sums of blocks, then within one: running sums of a whole vocabulary are slow.
    """
    num_rows, vocab_size = weights.shape
    if vocab_size % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -vocab_size % _BLOCK))
    blocks = weights.view(num_rows, -1, _BLOCK)
    sums = blocks.sum(dim=-1).double()
    ends = sums.cumsum(dim=-1)
    targets = noise[:, None] * ends[:, -1:]
    chosen = torch.searchsorted(ends, targets, right=True).clamp_(max=ends.shape[1] - 1)
    own = sums.gather(1, chosen)
    share = (targets - (ends.gather(1, chosen) - own)) / own
    inner = blocks.gather(1, chosen[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1).double().cumsum(dim=-1)
    total = inner[:, -1:]
    place = torch.searchsorted(inner, share.clamp_(min=0.0) * total, right=True)
    last = (inner < total).sum(dim=-1, keepdim=True)  # rounding must not lead behind the last weight
    return (chosen * _BLOCK + torch.minimum(place, last)).squeeze(-1)


def _filter(weights: torch.Tensor, top_k: Int32Array, top_p: Float32Array) -> None:
    """Sets the weights that top-k and top-p exclude to 0."""
    vocab_size = weights.shape[1]
    limits = np.where(top_k == 0, vocab_size, np.minimum(top_k, vocab_size)).astype(np.int64)
    filtered = np.flatnonzero((limits < vocab_size) | (top_p < 1))
    if not len(filtered):
        return
    index = torch.from_numpy(filtered)
    some = weights[index]
    thresholds = _thresholds(some, limits[filtered], top_p[filtered].astype(np.float64))
    weights[index] = some.masked_fill_(some < thresholds, 0.0)


def _thresholds(weights: torch.Tensor, limits: Int64Array, top_p: npt.NDArray[np.float64]) -> torch.Tensor:
    """The smallest weight each row keeps, [M, 1]: that of its nucleus within its `limits` largest."""
    vocab_size = weights.shape[1]
    limited = limits < vocab_size
    num_ordered = int(np.where(limited, limits, min(_NUCLEUS_CANDIDATES, vocab_size)).max())
    ordered = weights.topk(num_ordered, dim=-1).values
    masses = ordered.cumsum(dim=-1, dtype=torch.float64)
    last_limited = torch.from_numpy(np.minimum(limits, num_ordered) - 1)[:, None]
    targets = masses.gather(1, last_limited)
    if not limited.all():
        unlimited = torch.from_numpy(np.flatnonzero(~limited))
        targets[unlimited] = weights[unlimited].sum(dim=-1, keepdim=True, dtype=torch.float64)
    targets *= torch.from_numpy(top_p)[:, None]
    last = torch.searchsorted(masses, targets)
    thresholds = ordered.gather(1, torch.minimum(last, last_limited))
    wider = np.flatnonzero((last >= num_ordered).squeeze(-1).numpy() & ~limited)
    if len(wider) and num_ordered < vocab_size:
        index = torch.from_numpy(wider)
        thresholds[index] = _nucleus_thresholds(weights[index], targets[index])
    return thresholds


def _nucleus_thresholds(weights: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The smallest weight of each row's nucleus, [M, 1], by sorting the whole vocabulary."""
    ordered = weights.sort(dim=-1, descending=True).values
    last = torch.searchsorted(ordered.cumsum(dim=-1, dtype=torch.float64), targets)
    return ordered.gather(1, last.clamp_(max=weights.shape[1] - 1))


def _logprobs(
    logits: torch.Tensor, wanted: npt.NDArray[np.intp], token_ids: torch.Tensor, num_logprobs: Int32Array
) -> SampledLogprobs:
    """`logits`: of the rows `wanted`; everything else of all rows."""
    num_top = min(int(num_logprobs.max()), logits.shape[1])
    chosen = np.full(len(num_logprobs), np.nan, np.float32)
    top_ids = np.zeros((len(num_logprobs), num_top), np.int32)
    top_logprobs = np.zeros((len(num_logprobs), num_top), np.float32)
    logprobs = logits.log_softmax(dim=-1)
    top = logprobs.topk(num_top, dim=-1)
    chosen[wanted] = logprobs.gather(1, token_ids[torch.from_numpy(wanted), None]).squeeze(-1).numpy()
    top_ids[wanted], top_logprobs[wanted] = top.indices.numpy(), top.values.numpy()
    return SampledLogprobs(chosen, top_ids, top_logprobs, num_logprobs)
