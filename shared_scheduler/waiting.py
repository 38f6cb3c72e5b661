"""The queue of requests that wait for prefill.

In front: those that have been there before, in the order they were put there: half-computed prompts, the
preempted, forks. Behind them the newcomers, in the order of the policy. But whoever has been passed over in
`waiting_age_limit` prompt steps goes before them, the oldest first, so that nobody waits for ever.
"""

from collections import deque
from collections.abc import Iterable, Iterator

from shared_scheduler.config import SchedulerConfig, WaitingPolicy
from shared_scheduler.reuse import Reuse
from shared_scheduler.sequence import Sequence
from shared_scheduler.sharing import InBatchSharing
from shared_scheduler.waiting_orders import Waiter, WaitingOrder, make_order


class FcfsQueue(deque[Sequence]):
    """First come, first served."""

    def head(self) -> Sequence | None:
        return self[0] if self else None

    def drop_finished(self) -> list[Sequence]:
        """Take out whoever has ended by mark."""
        finished = [sequence for sequence in self if sequence.is_finished]
        if finished:
            left = [sequence for sequence in self if not sequence.is_finished]
            self.clear()
            self.extend(left)
        return finished

    def end_step(self) -> None:
        """A prompt step has been decided."""

    def computed(self, sequences: Iterable[Sequence]) -> None:
        """The results of a prompt step with these are in."""

    def ended(self, sequence: Sequence) -> None:
        """A request has ended, wherever it was."""

    def check_invariants(self) -> None:
        pass


class PolicyQueue:
    """Ordered by a policy; does what `FcfsQueue` does."""

    def __init__(self, order: WaitingOrder, reuse: Reuse, config: SchedulerConfig) -> None:
        self._order = order
        self._reuse = reuse
        self._age_limit = config.waiting_age_limit
        self._front: deque[Sequence] = deque()
        self._waiters: dict[Sequence, Waiter] = {}
        """By arrival."""
        self._sharing = InBatchSharing(config.block_size, -(-config.sharing_tokens // config.block_size))
        self._num_arrived = 0
        self._num_steps = 0

    def __len__(self) -> int:
        return len(self._front) + len(self._waiters)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._front
        yield from self._waiters

    def head(self) -> Sequence | None:
        """Who is next; None, too, if everybody waits for a prefix that is being computed."""
        if self._front:
            return self._front[0]
        if not self._waiters:
            return None
        oldest = next(iter(self._waiters.values()))
        if self._num_steps - oldest.step >= self._age_limit:
            return oldest.sequence
        while (waiter := self._order.first()) is not None:
            leader = self._sharing.leader_of(waiter)
            if leader is None:
                return waiter.sequence
            self._order.discard(waiter)
            self._sharing.park(waiter, leader)
        return None

    def append(self, sequence: Sequence) -> None:
        waiter = Waiter(sequence, self._num_arrived, self._num_steps, None)
        self._num_arrived += 1
        self._waiters[sequence] = waiter
        cache = self._reuse.cache
        if cache is not None:
            key = self._reuse.key(sequence, sequence.num_tokens - 1)
            waiter.watch = cache.tree.watch(key, sequence.cache_salt, lambda _: self._on_change(waiter))
        self._order.add(waiter)

    def appendleft(self, sequence: Sequence) -> None:
        self._front.appendleft(sequence)

    def extendleft(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._front.appendleft(sequence)
            self._sharing.leads_on(sequence)

    def popleft(self) -> Sequence:
        """Take the head out: it is to be computed, or it has ended."""
        head = self.head()
        assert head is not None
        if self._front:
            self._front.popleft()
            return head
        waiter = self._take(head)
        if not head.is_finished:
            self._sharing.leads(waiter)
            self._order.admitted(head)
        return head

    def remove(self, sequence: Sequence) -> None:
        """Take one out of the front."""
        self._front.remove(sequence)

    def drop_finished(self) -> list[Sequence]:
        finished = [sequence for sequence in self if sequence.is_finished]
        for sequence in finished:
            if sequence in self._waiters:
                self._take(sequence)
        if any(sequence.is_finished for sequence in self._front):
            self._front = deque(sequence for sequence in self._front if not sequence.is_finished)
        return finished

    def end_step(self) -> None:
        self._num_steps += 1

    def computed(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._release_followers(sequence)
            if not sequence.schedule.chunked_rest_len:
                self._sharing.forget(sequence)

    def ended(self, sequence: Sequence) -> None:
        self._release_followers(sequence)
        self._sharing.forget(sequence)
        self._order.ended(sequence)

    def check_invariants(self) -> None:
        self._sharing.check_invariants()

    def _release_followers(self, leader: Sequence) -> None:
        for waiter in self._sharing.take_followers(leader):
            self._order.add(waiter)

    def _take(self, sequence: Sequence) -> Waiter:
        """Take a newcomer out, be it parked or not."""
        waiter = self._waiters.pop(sequence)
        if self._sharing.is_parked(waiter):
            self._sharing.unpark(waiter)
        else:
            self._order.discard(waiter)
        if waiter.watch is not None and self._reuse.cache is not None:
            self._reuse.cache.tree.unwatch(waiter.watch)
        return waiter

    def _on_change(self, waiter: Waiter) -> None:
        if self._sharing.is_parked(waiter):
            self._sharing.unpark(waiter)
            self._order.add(waiter)
        else:
            self._order.changed(waiter)


WaitingQueue = FcfsQueue | PolicyQueue


def make_waiting_queue(config: SchedulerConfig, reuse: Reuse) -> WaitingQueue:
    if config.waiting_policy is WaitingPolicy.FCFS:
        return FcfsQueue()
    return PolicyQueue(make_order(config), reuse, config)
