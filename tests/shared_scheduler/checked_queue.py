"""A waiting queue that compares every head with what sorting everything anew would give."""

from collections import Counter

from shared_scheduler import Scheduler, Sequence, WaitingPolicy
from shared_scheduler.waiting import PolicyQueue
from shared_scheduler.waiting_orders import HeapOrder, RoutingKeyOrder, Waiter


class CheckedQueue(PolicyQueue):
    """`head` is the first by sorting: front, then the aged, then the policy, without those who follow."""

    scheduler: Scheduler

    def head(self) -> Sequence | None:
        head = super().head()
        assert head is self._expected(), f"{head!r} instead of {self._expected()!r}"
        return head

    def _expected(self) -> Sequence | None:
        if self._front:
            return self._front[0]
        waiters = sorted(self._waiters.values(), key=lambda waiter: waiter.serial)
        assert [waiter.sequence for waiter in waiters] == list(self._waiters)
        config = self.scheduler.config
        if waiters and self._num_steps - waiters[0].step >= config.waiting_age_limit:
            return waiters[0].sequence
        free = [waiter for waiter in waiters if self._sharing.leader_of(waiter) is None]
        if config.waiting_policy is WaitingPolicy.DFS_WEIGHT:
            first = self._order.first()
            return None if first is None else first.sequence
        free.sort(key=self._rank)  # stable: the earlier arrival comes first
        return free[0].sequence if free else None

    def _rank(self, waiter: Waiter) -> float:
        sequence = waiter.sequence
        match self.scheduler.config.waiting_policy:
            case WaitingPolicy.LPM:
                if self._reuse.cache is None:
                    return 0  # a model with states: nothing is found in blocks alone
                key = self._reuse.key(sequence, sequence.num_tokens - 1)
                return -self._reuse.cache.match(key, sequence.cache_salt).num_blocks
            case WaitingPolicy.LOF:
                return -sequence.sampling.max_tokens
            case WaitingPolicy.PRIORITY:
                return -sequence.priority
            case WaitingPolicy.ROUTING_KEY:
                assert isinstance(self._order, RoutingKeyOrder)
                live = self.scheduler._queues.by_id.values()
                counts = Counter(s.routing_key for s in live if s not in self._waiters)
                return -counts[sequence.routing_key] if sequence.routing_key else 0
            case _:
                assert isinstance(self._order, HeapOrder)
                return self._order._rank(waiter)


def check_heads(scheduler: Scheduler) -> None:
    """From now on every head of the scheduler's waiting queue is checked."""
    queue = scheduler._queues.waiting
    if isinstance(queue, PolicyQueue):
        queue.__class__ = CheckedQueue
        assert isinstance(queue, CheckedQueue)
        queue.scheduler = scheduler
