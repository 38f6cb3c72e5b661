"""Places for the draft model's own state, one per sequence that may be decoded."""

from collections.abc import Iterable

from shared_scheduler.errors import CorruptionError
from shared_scheduler.sequence import Sequence


class InfoSlots:
    """One slot of draft state per running sequence; none is ever given when nothing is drafted."""

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

    def check_invariants(self, holders: Iterable[Sequence]) -> None:
        """Each slot is free or has one holder."""
        taken = [s.draft.info_slot for s in holders if s.draft.info_slot is not None]
        assert sorted([*taken, *self._free]) == list(range(self._num_slots))

    def give_back(self, sequence: Sequence) -> None:
        slot = sequence.draft.info_slot
        if slot is not None:
            sequence.draft.info_slot = None
            self._free.append(slot)
