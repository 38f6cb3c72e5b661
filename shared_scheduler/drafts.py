"""Drafted tokens: info slots, and how many drafts of a batch are worth verifying."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from shared_scheduler.errors import CorruptionError
from shared_scheduler.rows import Int32Array
from shared_scheduler.sequence import Sequence

Int64Array = npt.NDArray[np.int64]


class InfoSlots:
    """One slot of draft state per running sequence; absent (always None) when nothing is drafted."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_taken(self) -> int:
        return self._num_slots - len(self._free)

    def take(self, sequence: Sequence) -> None:
        if not self._num_slots or sequence.draft.info_slot is not None:
            return
        if not self._free:
            raise CorruptionError(f"no draft slot left for {sequence.request_id!r}")
        sequence.draft.info_slot = self._free.pop()

    def give_back(self, sequence: Sequence) -> None:
        slot = sequence.draft.info_slot
        if slot is not None:
            sequence.draft.info_slot = None
            self._free.append(slot)


REJECTED = -1
"""In `accepted`: this draft and all after it were rejected."""


def accepted_prefixes(seqlens_q: Int32Array, accepted: Int64Array) -> Iterator[list[int]]:
    """Per sequence, the drafts accepted in a row. `accepted` is flat: seqlens_q[i] - 1 entries each."""
    at = 0
    for num_drafts in (seqlens_q - 1).tolist():
        ids = accepted[at : at + num_drafts].tolist()
        at += num_drafts
        yield ids[: ids.index(REJECTED)] if REJECTED in ids else ids
