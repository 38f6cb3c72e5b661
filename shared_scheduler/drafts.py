"""Drafted tokens: which of them are worth verifying, and which were accepted."""

from collections.abc import Iterator
from collections.abc import Sequence as Many

import numpy as np
import numpy.typing as npt

from shared_scheduler.config import SchedulerConfig
from shared_scheduler.rows import Int32Array
from shared_scheduler.sequence import Sequence
from shared_scheduler.step_time import StepTimeModel

Int64Array = npt.NDArray[np.int64]

REJECTED = -1
"""In `accepted`: this draft and all after it were rejected."""


class DraftChooser:
    """Cuts the drafts of a decode batch to the number that yields most tokens per second."""

    def __init__(self, config: SchedulerConfig, step_time: StepTimeModel) -> None:
        self._config = config
        self._step_time = step_time

    def trim(self, sequences: Many[Sequence]) -> None:
        """Shorten each sequence's drafts: those that cannot count, then those not worth their time."""
        for sequence in sequences:
            self._cut(sequence, self._longest_useful(sequence))
        drafted = [sequence for sequence in sequences if sequence.draft.token_ids]
        if drafted and self._step_time.is_fitted:
            counts = self._best_counts([_reach_probabilities(s) for s in drafted], len(sequences))
            for sequence, count in zip(drafted, counts, strict=True):
                self._cut(sequence, count)

    def _longest_useful(self, sequence: Sequence) -> int:
        """Drafts and the sampled token must stay within max_tokens and the model's length."""
        num_inflight = sequence.schedule.total_inflight_tokens
        left = sequence.sampling.max_tokens - sequence.num_output_tokens - num_inflight
        left = min(left, self._config.max_model_len - sequence.num_tokens - num_inflight)
        return max(0, min(self._config.max_num_draft_tokens, left - 1))

    def _cut(self, sequence: Sequence, count: int) -> None:
        draft = sequence.draft
        draft.token_ids = draft.token_ids[:count]
        draft.confidences = draft.confidences[:count]

    def _best_counts(self, gains: list[npt.NDArray[np.float64]], num_sequences: int) -> list[int]:
        """Drafts per sequence that maximise (N + expected accepted) / step time.

        A sequence's gains never rise, so the k largest of all are always prefixes.
        """
        owners = np.repeat(np.arange(len(gains)), [gain.size for gain in gains])
        flat = np.concatenate(gains)
        best_first = np.argsort(-flat, kind="stable")
        expected = num_sequences + np.concatenate([[0.0], np.cumsum(flat[best_first])])
        tokens = num_sequences + np.arange(flat.size + 1)
        rate = expected / self._step_time.predict_s(num_sequences, tokens)
        chosen = owners[best_first[: int(rate.argmax())]]
        counts: list[int] = np.bincount(chosen, minlength=len(gains)).tolist()
        return counts


def accepted_prefixes(seqlens_q: Int32Array, accepted: Int64Array) -> Iterator[list[int]]:
    """Per sequence, the drafts accepted in a row. `accepted` is flat: seqlens_q[i] - 1 entries each."""
    at = 0
    for num_drafts in (seqlens_q - 1).tolist():
        ids = accepted[at : at + num_drafts].tolist()
        at += num_drafts
        yield ids[: ids.index(REJECTED)] if REJECTED in ids else ids


def _reach_probabilities(sequence: Sequence) -> npt.NDArray[np.float64]:
    """For each draft, the probability that it and all before it are accepted."""
    draft = sequence.draft
    given = draft.confidences
    if len(given) != len(draft.token_ids):
        given = ((draft.num_accepted + 1) / (draft.num_proposed + 2),) * len(draft.token_ids)
    return np.multiply.accumulate(np.array(given, np.float64))
