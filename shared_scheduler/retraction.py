"""Who gives way when blocks run out, where `retract_cheapest` asks for the lowest cost.

1. The victim is the running sequence that is cheapest to lose: fewest outputs, then longest input. What is
   computed of it stays in the prefix cache, if there is one.
2. The last running sequence is no victim while anything else holds blocks: half-computed prompts, then forks
   that have not begun, give theirs up first.
3. When it is alone and the pool is still too small it ends, as preempted: computing it again would not help.

`test_retract_interval` retracts the cheapest every so many decode steps, so that the cold path is walked.
"""

from collections.abc import Callable

from shared_scheduler.config import SchedulerConfig
from shared_scheduler.holdings import Holdings
from shared_scheduler.queues import Queues
from shared_scheduler.sequence import Sequence


class Retraction:
    """The choice of victims of one scheduler."""

    def __init__(self, config: SchedulerConfig, queues: Queues, holdings: Holdings) -> None:
        self.is_on = config.retract_cheapest
        self._interval = config.test_retract_interval
        self._queues = queues
        self._holdings = holdings
        self._num_steps = 0

    def is_due(self) -> bool:
        """Does the test interval ask for a retraction in this decode step?"""
        if self._interval is None:
            return False
        self._num_steps += 1
        return self._num_steps % self._interval == 0

    def cheapest_first(self, sequences: list[Sequence]) -> list[Sequence]:
        return sorted(sequences, key=lambda s: (s.num_output_tokens, -s.num_prompt_tokens))

    def clear_way(self, is_enough: Callable[[int], bool], end: Callable[[Sequence], int]) -> bool:
        """Take blocks from all but the running until `is_enough`; `end` ends an unadmitted fork.

        False: there are not so many. Both calls count blocks that come back only with results.
        """
        num_coming = 0
        for sequence in [s for s in self._queues.waiting if s.holds_blocks and not s.is_finished]:
            self._holdings.give_back_unused_pin(sequence)
            num_coming += self._holdings.release(sequence)
            sequence.reset_for_recompute()
            if is_enough(num_coming):
                return True
        while self._queues.prompted:
            num_coming += end(self._queues.prompted.pop())
            if is_enough(num_coming):
                return True
        return False
