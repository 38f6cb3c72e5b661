"""Log probabilities of a prompt's own tokens, taken from the logits of its prefill.

The logits behind prompt token i judge token i + 1, so a chunk judges the tokens that follow its own; what
its last token judges may be in the next chunk. Results are put in place by position: a prompt that is
computed again after a preemption judges the same tokens again. Cached tokens have no logits, so such a
prompt is computed whole (`Sequence.needs_whole_prompt`).
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shared_scheduler import Batch, SchedulerOutputs, Sequence
from wire.services import PromptLogprobs, TokenLogprobs

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

ROWS_AT_ONCE = 64
"""Bounds the memory for probabilities of the whole vocabulary."""

LOGITS_BYTES = 256 << 20
"""Of the logits that one step keeps for prompts."""


def max_scored_tokens(vocab_size: int) -> int:
    """How many tokens of prompts a step may judge at most."""
    return max(1, LOGITS_BYTES // (4 * vocab_size))


@dataclass(frozen=True, slots=True, eq=False)
class PromptSpan:
    """The tokens of the sequence at `index` of a step that have a prompt token behind them."""

    index: int
    first_row: int
    """Of the step's tokens; the others follow it."""
    position: int
    """Of the first token that is judged."""
    targets: Int64Array
    """The tokens that are judged."""
    num_top: int

    @property
    def rows(self) -> Int64Array:
        return np.arange(self.first_row, self.first_row + self.targets.size)


@dataclass(frozen=True, slots=True, eq=False)
class ScoredSpan:
    """What a step has found out about the tokens that a span judges."""

    index: int
    position: int
    logprobs: Float32Array
    top_ids: Int32Array
    """[tokens, num_top]"""
    top_logprobs: Float32Array


class PromptScores:
    """Of one prompt, filled as its chunks are computed."""

    def __init__(self, num_prompt_tokens: int, num_top: int) -> None:
        self._is_judged = np.zeros(num_prompt_tokens, bool)
        self._logprobs = np.zeros(num_prompt_tokens, np.float32)
        self._top_ids = np.zeros((num_prompt_tokens, num_top), np.int32)
        self._top_logprobs = np.zeros((num_prompt_tokens, num_top), np.float32)

    def add(self, scored: ScoredSpan) -> None:
        at = slice(scored.position, scored.position + scored.logprobs.size)
        self._is_judged[at], self._logprobs[at] = True, scored.logprobs
        self._top_ids[at], self._top_logprobs[at] = scored.top_ids, scored.top_logprobs

    def report(self) -> PromptLogprobs:
        """Of all tokens but the first."""
        assert self._is_judged[1:].all(), "the prompt was not computed whole"
        columns = (array[1:].tolist() for array in (self._logprobs, self._top_ids, self._top_logprobs))
        return tuple(
            TokenLogprobs(logprob=logprob, top_token_ids=tuple(ids), top_logprobs=tuple(logprobs))
            for logprob, ids, logprobs in zip(*columns, strict=True)
        )


def prompt_spans(outputs: SchedulerOutputs) -> tuple[PromptSpan, ...]:
    """What a step is to judge; called by the engine thread when it is launched."""
    batch = outputs.batch
    if batch is None or not batch.is_prompt:
        return ()
    if not any(sequence.needs_whole_prompt for sequence in outputs.sequences):
        return ()
    ends = np.cumsum(batch.seqlens_q).tolist()
    spans = (
        _span(batch, index, sequence, end)
        for index, (sequence, end) in enumerate(zip(outputs.sequences, ends, strict=True))
        if sequence.needs_whole_prompt
    )
    return tuple(span for span in spans if span.targets.size)


def _span(batch: Batch, index: int, sequence: Sequence, end_row: int) -> PromptSpan:
    first_row = end_row - int(batch.seqlens_q[index])
    first, end = int(batch.positions[first_row]) + 1, int(batch.positions[end_row - 1]) + 2
    targets = sequence.stored_tokens(first, min(end, sequence.num_prompt_tokens)).astype(np.int64)
    return PromptSpan(index, first_row, first, targets, sequence.sampling.prompt_logprobs or 0)


def rows_of(batch: Batch, spans: Items[PromptSpan]) -> Int64Array:
    """Whose logits a step needs, ascending: each sequence's last token, and what judges a prompt token."""
    last = np.cumsum(batch.seqlens_q, dtype=np.int64) - 1
    return np.unique(np.concatenate([last, *(span.rows for span in spans)]))


def score_spans(logits: torch.Tensor, rows: Int64Array, spans: Items[PromptSpan]) -> tuple[ScoredSpan, ...]:
    """`logits` float32 [R, vocab] of `rows` [R]."""
    return tuple(_scored(logits, int(np.searchsorted(rows, span.first_row)), span) for span in spans)


def _scored(logits: torch.Tensor, first: int, span: PromptSpan) -> ScoredSpan:
    own, ids, top = judge(logits[first : first + span.targets.size], span.targets, span.num_top)
    return ScoredSpan(span.index, span.position, own.cpu().numpy(), ids.cpu().numpy(), top.cpu().numpy())


def judge(
    logits: torch.Tensor, targets: Int64Array, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What rows [N, vocab] say of the tokens `targets` [N], where the logits are.

    Log probabilities [N], the best tokens int32 [N, num_top] and their log probabilities.
    """
    num_top = min(num_top, logits.shape[1])
    wanted = torch.from_numpy(targets).to(logits.device)
    own, ids, top = [], [], []
    cuts = list(range(ROWS_AT_ONCE, len(targets), ROWS_AT_ONCE))
    for rows, some in zip(logits.tensor_split(cuts), wanted.tensor_split(cuts), strict=True):
        logprobs = rows.log_softmax(dim=-1)
        best = logprobs.topk(num_top, dim=-1)
        own.append(logprobs.gather(1, some.unsqueeze(1)).squeeze(1))
        ids.append(best.indices.int())
        top.append(best.values)
    return torch.cat(own), torch.cat(ids), torch.cat(top)


def keep_scores(outputs: SchedulerOutputs, scored: Items[ScoredSpan]) -> None:
    """A step's results are in: put them with their sequences."""
    for span in scored:
        sequence = outputs.sequences[span.index]
        if sequence.prompt_scores is None:
            num_top = span.top_ids.shape[1]
            sequence.prompt_scores = PromptScores(sequence.num_prompt_tokens, num_top)
        assert isinstance(sequence.prompt_scores, PromptScores)
        sequence.prompt_scores.add(span)


def take_prompt_logprobs(sequence: Sequence, first_index: int) -> PromptLogprobs | None:
    """What the sequence reports with its output token `first_index`: nothing but with token 0."""
    if sequence.sampling.prompt_logprobs is None or first_index:
        return None
    scores, sequence.prompt_scores = sequence.prompt_scores, None
    if scores is None:
        return ()  # a prompt of one token
    assert isinstance(scores, PromptScores)
    return scores.report()
