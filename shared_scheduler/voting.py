"""Engines that must step alike: which kind of step comes next, agreed by minimum-votes."""

from typing import Protocol

from shared_scheduler.config import SchedulerConfig


class GroupVote(Protocol):
    """A collective of all ranks. Blocks until every rank has called; `GroupError` if one does not answer."""

    def allreduce_min(self, value: int) -> int: ...


class SingleRank:
    """A group of one: its own vote decides."""

    def allreduce_min(self, value: int) -> int:
        return value


class StepClock:
    """Counts decode steps since the last prompt step and says when a prompt step may be tried."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._all_interval = config.prefill_attempt_interval
        self._any_interval = config.prefill_any_attempt_interval
        self.decode_step = 0

    @property
    def is_any_point(self) -> bool:
        """One rank that wants a prompt step is enough."""
        return self.decode_step != 0 and self.decode_step % self._any_interval == 0

    @property
    def is_all_point(self) -> bool:
        """Every rank must want it."""
        return self.decode_step % self._all_interval == 0

    def tick(self, prompt_run: bool) -> None:
        """Empty steps count like any other."""
        self.decode_step = 0 if prompt_run else self.decode_step + 1

    def vote_prompt(self, group: GroupVote, wants: bool) -> bool:
        """First vote: is a prompt step tried? No vote is held between the points."""
        if self.is_any_point:
            return group.allreduce_min(0 if wants else 1) == 0
        if self.is_all_point:
            return group.allreduce_min(1 if wants else 0) == 1
        return False

    def vote_built(self, group: GroupVote, built: bool) -> bool:
        """Second vote: did any rank put a prompt step together?"""
        return group.allreduce_min(0 if built else 1) == 0
