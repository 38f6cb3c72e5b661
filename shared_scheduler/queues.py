"""Where every live sequence is.

1. `add_sequence` puts it at the tail of `waiting`; nothing physical is reserved.
2. A prompt step takes it from the head of `waiting`; while the chunk is in flight it is in no queue.
3. A middle chunk returns it to the head of `waiting`; the last chunk moves it to `running` (NORMAL) or to
   `held` (PROMPT), where it stays until the hand-over is released.
4. A COMPLETION engine reserves blocks for it in `remote`; when its KV has arrived it goes to `prompted`, as
   does a fork whose prompt is complete; a decode step admits it from there to `running`.
5. A preempted sequence goes back to the head of `waiting`, or ends.
6. `abort` only marks. Whoever meets a marked sequence next takes it out: the sweep of a step, or the results
   of the step it is in. Its blocks go back only when no launched step contains it.

`by_id` holds every sequence whose end has not been reported yet, so each end is reported once.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np

from shared_scheduler.errors import RequestError
from shared_scheduler.holdings import Holdings
from shared_scheduler.rows import RowIndices
from shared_scheduler.sequence import Sequence
from shared_scheduler.status import SequenceStatus
from shared_scheduler.waiting import WaitingQueue


class Queues:
    """The queues of one scheduler."""

    def __init__(self, holdings: Holdings, waiting: WaitingQueue) -> None:
        self._holdings = holdings
        self.waiting = waiting
        self.prompted: deque[Sequence] = deque()
        self.running: RowIndices = np.empty(0, np.intp)
        """Rows, in the order of the last decode batch and then of arrival here."""
        self.running_is_ordered = True
        """Nothing joined and no length changed by other than one since `running` was put in order."""
        self.remote: dict[str, Sequence] = {}
        self.held: dict[str, Sequence] = {}
        self.by_id: dict[str, Sequence] = {}
        self.num_joining = 0
        """Sequences in launched prompt steps that will join `running`."""
        self.has_marked = False
        """Something may have ended by mark since the last sweep."""
        self.has_drafts = False
        """Some running sequence may have drafts to verify."""
        self.expects_first_tokens = False
        """Some fork may get its first output token from a decode step."""
        self.num_with_stop_ids = 0
        self.last_step_id = -1
        self.disturbed_step_id = -1
        """Newest launched step in which a sequence has ended or been preempted since its launch."""

    def register(self, sequence: Sequence) -> None:
        if sequence.request_id in self.by_id:
            raise RequestError(f"request id {sequence.request_id!r} is already in use")
        self.by_id[sequence.request_id] = sequence
        self.num_with_stop_ids += bool(sequence.sampling.stop_token_ids)

    def report(self, sequence: Sequence) -> bool:
        """True the first time: the caller tells the engine that this sequence has ended."""
        if not self.is_unreported(sequence):
            return False
        del self.by_id[sequence.request_id]
        self.waiting.ended(sequence)
        self.num_with_stop_ids -= bool(sequence.sampling.stop_token_ids)
        return True

    def is_unreported(self, sequence: Sequence) -> bool:
        return self.by_id.get(sequence.request_id) is sequence

    def disturb(self) -> None:
        """A sequence in a launched step has ended or been preempted: results must look at each status."""
        self.disturbed_step_id = self.last_step_id

    @property
    def num_running(self) -> int:
        return int(self.running.size)

    def running_sequences(self) -> list[Sequence]:
        sequences: list[Sequence] = self._holdings.rows.owners[self.running].tolist()
        return sequences

    def join_running(self, sequences: list[Sequence]) -> None:
        if sequences:
            rows = np.array([sequence.row for sequence in sequences], np.intp)
            self.running = np.concatenate([self.running, rows])
            self.running_is_ordered = False

    def leave_running(self, sequences: list[Sequence]) -> None:
        if sequences:
            self.running = self._without(self.running, [sequence.row for sequence in sequences])

    def sweep_marked(self) -> list[Sequence]:
        """Take everything that ended by mark out of every queue; returns those to be reported."""
        self.has_marked = False
        dead = [sequence for sequence in self.prompted if sequence.is_finished]
        if dead:
            self.prompted = deque(sequence for sequence in self.prompted if not sequence.is_finished)
        dead += self.waiting.drop_finished()
        for sequence in dead:
            self._holdings.give_back_unused_pin(sequence)
        dead += self.sweep_running()
        return [sequence for sequence in dead if self.end_queued(sequence)]

    def sweep_running(self) -> list[Sequence]:
        """Take out of `running` what has ended. The swept still hold what they hold: `end_queued` them."""
        swept = [sequence for sequence in self.running_sequences() if sequence.is_finished]
        self.leave_running(swept)
        return swept

    def _without(self, rows: RowIndices, gone: list[int]) -> RowIndices:
        stays = np.ones(self._holdings.rows.capacity, bool)
        stays[gone] = False
        return rows[stays[rows]]

    def end_queued(self, sequence: Sequence) -> bool:
        """Release a sequence that has ended, unless it is in flight; True if it is to be reported."""
        if not sequence.is_in_flight:
            self._holdings.release(sequence)
        return self.report(sequence)

    def holders(self) -> Iterator[Sequence]:
        """Every sequence that has a row."""
        owners = self._holdings.rows.owners
        return (owners[row] for row in self._holdings.rows.taken().tolist())

    def check_invariants(self) -> None:
        """A live sequence is in at most one queue, and what is in `running` holds blocks and runs."""
        queued = [*self.waiting, *self.prompted, *self.remote.values(), *self.held.values()]
        queued += self.running_sequences()
        self.waiting.check_invariants()
        names = [id(sequence) for sequence in queued]
        assert len(set(names)) == len(names), "a sequence is in two queues"
        for sequence in self.running_sequences():
            assert sequence.holds_blocks
            assert sequence.is_finished or sequence.status is SequenceStatus.RUNNING, repr(sequence)
        for sequence in self.waiting:
            assert sequence.is_finished or sequence.status is SequenceStatus.WAITING, repr(sequence)
        queued_ids = set(names)
        for sequence in self.by_id.values():
            assert id(sequence) in queued_ids or sequence.is_in_flight, f"{sequence!r} is lost"
        for sequence in self.holders():
            assert id(sequence) in queued_ids or sequence.is_in_flight, f"{sequence!r} leaks its blocks"
