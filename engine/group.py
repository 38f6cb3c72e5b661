"""Engines that step alike: data-parallel ranks whose steps share collectives (docs/decisions/004-groups.md).

1. idle     nobody has work and everybody sleeps. Once a second, or as soon as a rank has work and rings the
            bell, all ask each other whether anyone has work
2. busy     everybody steps: schedule, with votes at attempt points, then `begin_step` before the model runs.
            Who has nothing to run takes part with an empty step. The last is one where nobody has work
3. broken   a rank is gone, silent or out of step: `GroupError`, now and at every later call
"""

import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

from engine.collective import Collective
from engine.group_bell import GroupBell
from shared_scheduler import GroupError, GroupVote

IDLE_VOTE_S = 1.0
ROW_WIDTH = 5
"""Operation, number of the collective, number of the step, and two values."""


class StepGroup(GroupVote, Protocol):
    """What an engine needs of the group it is in."""

    @property
    def is_busy(self) -> bool:
        """Some rank had work when the ranks last spoke: every rank has to step."""
        ...

    @property
    def is_quiet(self) -> bool:
        """No rank has anything to run before the next vote: until then empty steps need no collective."""
        ...

    @property
    def wait_s(self) -> float:
        """Time spent waiting for other ranks so far."""
        ...

    def takes_step(self, has_work: bool) -> bool:
        """Is it time to step? May ask the other ranks, and then waits for their answers."""
        ...

    def begin_step(self, step_id: int, prompt_run: bool, *, is_empty: bool, has_work: bool) -> bool:
        """Every rank runs this kind of step now. True: it is empty on all of them."""
        ...

    def close(self) -> None: ...


class Solo:
    """A group of one."""

    is_busy = False
    is_quiet = False
    wait_s = 0.0

    def allreduce_min(self, value: int) -> int:
        return value

    def takes_step(self, has_work: bool) -> bool:
        return has_work

    def begin_step(self, step_id: int, prompt_run: bool, *, is_empty: bool, has_work: bool) -> bool:
        return is_empty

    def close(self) -> None:
        pass


class Operation(IntEnum):
    """What a rank does in a collective; all must do the same."""

    IDLE_VOTE = 0
    VOTE = 1
    DECODE_STEP = 2
    PROMPT_STEP = 3

    def __str__(self) -> str:
        return ("an idle vote", "a vote", "a decode step", "a prompt step")[self]


class EngineGroup:
    """One rank of a connected group. Used by the engine's loop only."""

    def __init__(
        self,
        rank: int,
        collective: Collective,
        bell: GroupBell,
        *,
        step_timeout_s: float = 300.0,
        idle_vote_s: float = IDLE_VOTE_S,
        keep: object = None,
    ) -> None:
        """`step_timeout_s`: how long a rank that lives may keep the others waiting.

        `keep` lives as long as the group: the store, which tells latecomers that their place is taken.
        """
        self._keep = keep
        self._rank = rank
        self._collective = collective
        self._bell = bell
        self._step_timeout_s = step_timeout_s
        self._idle_vote_s = idle_vote_s
        self._number = 0
        self._started_s = time.monotonic()
        """When the last collective began."""
        self._broken_by: str | None = None
        self.is_busy = False
        self.is_quiet = False
        self.wait_s = 0.0

    def allreduce_min(self, value: int) -> int:
        """`GroupVote`: the smallest value any rank sent."""
        return min(row[0] for row in self._exchange(Operation.VOTE, 0, value))

    def takes_step(self, has_work: bool) -> bool:
        if self.is_busy:
            return True
        is_called = self._bell.has_rung(self._number) or self._bell.departed_rank is not None
        is_due = time.monotonic() - self._started_s >= self._idle_vote_s
        if not (has_work or is_called or is_due):
            return False
        if not is_called:
            self._bell.ring(self._number)
        self.is_busy = any(row[0] for row in self._exchange(Operation.IDLE_VOTE, 0, has_work))
        return self.is_busy

    def begin_step(self, step_id: int, prompt_run: bool, *, is_empty: bool, has_work: bool) -> bool:
        kind = Operation.PROMPT_STEP if prompt_run else Operation.DECODE_STEP
        rows = self._exchange(kind, step_id, has_work, is_empty)
        self.is_busy = any(row[0] for row in rows)
        is_empty_everywhere = all(row[1] for row in rows)
        self.is_quiet = self.is_busy and is_empty_everywhere
        return is_empty_everywhere

    def close(self) -> None:
        """Leave: the others will be told with a `GroupError` at their next collective."""
        self._bell.close()

    def _exchange(
        self, operation: Operation, step_id: int, first: int, second: int = 0
    ) -> Sequence[Sequence[int]]:
        """The two values of every rank."""
        if self._broken_by is not None:
            raise GroupError(self._broken_by)
        self._started_s = time.monotonic()
        self.is_quiet = False
        own = (operation, self._number, step_id, int(first), int(second))
        try:
            rows = self._collective.gather(own, self._check_others)
            check_alike(rows)
        except (GroupError, ConnectionError) as error:
            self._broken_by = f"the group of rank {self._rank} has ended: {self._explain(error)}"
            raise GroupError(self._broken_by) from error
        finally:
            self.wait_s += time.monotonic() - self._started_s
        self._number += 1
        return [row[3:] for row in rows]

    def _check_others(self) -> None:
        """Waiting is fine while the others live, up to a limit."""
        if self._bell.departed_rank is not None:
            raise GroupError(f"rank {self._bell.departed_rank} has left")
        silent_rank = self._bell.silent_rank
        if silent_rank is not None:
            raise GroupError(f"rank {silent_rank} does not answer")
        if time.monotonic() - self._started_s > self._step_timeout_s:
            raise GroupError(f"another rank has not begun its step for {self._step_timeout_s:g} s")

    def _explain(self, error: Exception) -> str:
        if self._bell.departed_rank is not None:
            return f"rank {self._bell.departed_rank} has left"
        if isinstance(error, ConnectionError):
            other = f"rank {1 - self._rank}" if self._collective.size == 2 else "another rank"
            return f"{other} is lost ({error})"
        return str(error)


def check_alike(rows: Sequence[Sequence[int]]) -> None:
    """`GroupError` unless all ranks do the same thing at the same time."""
    if all(row[:3] == rows[0][:3] for row in rows):
        return
    doings = [f"rank {rank} {_describe(row)}" for rank, row in enumerate(rows)]
    raise GroupError("the ranks do not step alike: " + ", ".join(doings))


def _describe(row: Sequence[int]) -> str:
    operation, number, step_id = row[:3]
    step = f" (step {step_id})" if operation >= Operation.DECODE_STEP else ""
    return f"is at {Operation(operation)}{step}, collective {number}"
