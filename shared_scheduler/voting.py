"""Engines that must step alike: which kind of step comes next, agreed by minimum-votes.

Two rules keep every rank at the same vote: all ranks run the same kind of step, so their clocks agree; and
they compare their configurations before the first step, so their voting points agree.
"""

import threading
from typing import Protocol

from shared_scheduler.config import SchedulerConfig
from shared_scheduler.errors import GroupError


class GroupVote(Protocol):
    """A collective of all ranks."""

    def allreduce_min(self, value: int) -> int:
        """The smallest value any rank sent (signed 64 bit).

        Returns when every rank has called; `GroupError` if one does not within the implementation's limit.
        """


class SingleRank:
    """A group of one: its own vote decides."""

    def allreduce_min(self, value: int) -> int:
        return value


class ThreadGroup:
    """Ranks as threads of one process, for tests and the simulator."""

    def __init__(self, size: int, timeout_s: float = 10.0) -> None:
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._values = [0] * size

    def rank(self, index: int) -> "ThreadRank":
        return ThreadRank(self, index)

    def leave(self) -> None:
        """A rank gives up: everyone who waits, now or later, gets a `GroupError`."""
        self._barrier.abort()

    def allreduce_min(self, index: int, value: int) -> int:
        try:
            self._values[index] = value
            self._barrier.wait()
            smallest = min(self._values)
            self._barrier.wait()  # nobody may send the next value before all have read this one
        except threading.BrokenBarrierError:
            raise GroupError(f"rank {index} waited for a rank that does not answer") from None
        return smallest


class ThreadRank:
    """One rank of a `ThreadGroup`."""

    def __init__(self, group: ThreadGroup, index: int) -> None:
        self._group = group
        self._index = index

    def allreduce_min(self, value: int) -> int:
        return self._group.allreduce_min(self._index, value)


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

    @property
    def is_voting_point(self) -> bool:
        return self.is_any_point or self.is_all_point

    def tick(self, prompt_run: bool) -> None:
        """Empty steps count like any other."""
        self.decode_step = 0 if prompt_run else self.decode_step + 1

    def vote_prompt(self, group: GroupVote, wants: bool) -> bool:
        """First vote, at voting points only: is a prompt step tried?"""
        if self.is_any_point:
            return group.allreduce_min(0 if wants else 1) == 0
        return group.allreduce_min(1 if wants else 0) == 1

    def vote_built(self, group: GroupVote, built: bool) -> bool:
        """Second vote: did any rank put a prompt step together?"""
        return group.allreduce_min(0 if built else 1) == 0


def agree_on_config(config: SchedulerConfig, group: GroupVote) -> None:
    """Compare digests when the group forms; `GroupError` names the option and both values."""
    low, high = _range(group, config.digest())
    if low == high:
        return
    # Every rank sees the difference, so every rank walks through the fields together.
    for name, text in config.digest_fields().items():
        low, high = _range(group, _as_int(text))
        if low != high:
            values = f"{low} and {high}" if _is_int(text) else f"{text} here, something else on another rank"
            raise GroupError(f"ranks of one group differ in {name}: {values}; give all ranks the same")
    raise GroupError("ranks of one group differ in their scheduling configuration")


def _range(group: GroupVote, value: int) -> tuple[int, int]:
    return group.allreduce_min(value), -group.allreduce_min(-value)


def _is_int(text: str) -> bool:
    return text.lstrip("-").isdigit()


def _as_int(text: str) -> int:
    """The number itself, or 62 bits that differ if the texts do."""
    return int(text) if _is_int(text) else SchedulerConfig.hash_text(text)
