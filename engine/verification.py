"""Which drafts of a decode step the model would have drawn itself.

The token behind every draft is drawn as if there had been no drafts, with its own noise: noise is a function
of (seed, output index). A draft that equals the token drawn in its place is accepted, and what was drawn
behind it counts. So the output is the very one that the same logits give without drafts, greedy or sampled.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared_scheduler import REJECTED, Batch

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """What a step with drafts has established, for N sequences of T tokens."""

    token_ids: Int64Array
    """[N]: the token drawn behind each sequence's last accepted draft."""
    accepted: Int64Array
    """[T - N], flat: the accepted drafts, REJECTED in place of the others."""
    num_accepted: Int32Array
    """[N]"""
    num_rejected: Int32Array
    """[N]"""


def verify(batch: Batch, drawn: Int64Array) -> Verified:
    """`drawn` [T]: the token drawn behind each token of the batch."""
    seqlens_q = batch.seqlens_q
    first = np.cumsum(seqlens_q) - seqlens_q
    is_draft = np.ones(drawn.size, bool)
    is_draft[first] = False
    at = np.flatnonzero(is_draft)
    drafts = batch.token_ids[at].astype(np.int64)
    num_wrong = np.cumsum(is_draft & np.insert(drawn[:-1] != batch.token_ids[1:], 0, False))
    owner = np.repeat(np.arange(seqlens_q.size), seqlens_q)
    is_right = (num_wrong == num_wrong[first][owner])[at]
    num_accepted = np.bincount(owner[at[is_right]], minlength=seqlens_q.size).astype(np.int32)
    return Verified(
        drawn[first + num_accepted],
        np.where(is_right, drafts, REJECTED),
        num_accepted,
        seqlens_q - 1 - num_accepted,
    )
