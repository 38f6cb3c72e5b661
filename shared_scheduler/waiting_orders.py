"""Orders in which waiting requests are admitted: which of those that are entered comes first.

Among equals the earlier arrival comes first. None of the orders sorts: a heap, or a heap of groups,
is kept up to date as requests come, go and change; entries out of date are dropped when they come up.
The exception is `dfs-weight`, whose order depends on the whole tree: it is found once for a step.
"""

from collections import Counter
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from random import Random
from typing import Protocol

from shared_scheduler.config import SchedulerConfig, WaitingPolicy
from shared_scheduler.radix_tree import Node, Watch
from shared_scheduler.sequence import Sequence


class Waiter:
    """A request in the queue: `serial` counts arrivals, `step` is the number of prompt steps before it."""

    __slots__ = ("sequence", "serial", "step", "watch")

    def __init__(self, sequence: Sequence, serial: int, step: int, watch: Watch | None) -> None:
        self.sequence = sequence
        self.serial = serial
        self.step = step
        self.watch = watch
        """How much of its prompt is in the prefix cache."""

    def __lt__(self, other: "Waiter") -> bool:
        return self.serial < other.serial

    @property
    def num_cached_blocks(self) -> int:
        return 0 if self.watch is None else self.watch.num_blocks


class WaitingOrder(Protocol):
    """Waiters in the order of one policy."""

    def add(self, waiter: Waiter) -> None: ...

    def discard(self, waiter: Waiter) -> None: ...

    def changed(self, waiter: Waiter) -> None:
        """More or less of its prompt is cached than before."""

    def first(self) -> Waiter | None: ...

    def admitted(self, sequence: Sequence) -> None:
        """It has left the queue to be computed."""

    def ended(self, sequence: Sequence) -> None:
        """It has ended, admitted or not."""


class HeapOrder:
    """The lowest rank first; a rank may change while the waiter is cached more or less."""

    def __init__(self, rank: Callable[[Waiter], float]) -> None:
        self._rank = rank
        self._ranks: dict[Waiter, float] = {}
        self._heap: list[tuple[float, Waiter]] = []

    def add(self, waiter: Waiter) -> None:
        rank = self._ranks[waiter] = self._rank(waiter)
        heappush(self._heap, (rank, waiter))

    def discard(self, waiter: Waiter) -> None:
        del self._ranks[waiter]
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [(rank, waiter) for waiter, rank in self._ranks.items()]
            heapify(self._heap)

    def changed(self, waiter: Waiter) -> None:
        if self._ranks[waiter] != self._rank(waiter):
            self.add(waiter)

    def first(self) -> Waiter | None:
        heap = self._heap
        while heap:
            rank, waiter = heap[0]
            if self._ranks.get(waiter) == rank:
                return waiter
            heappop(heap)
        return None

    def admitted(self, sequence: Sequence) -> None:
        pass

    def ended(self, sequence: Sequence) -> None:
        pass


class RoutingKeyOrder:
    """The key with the most admitted requests first: they have the most in common with what is being served.

    A request without a key belongs to no group.
    """

    def __init__(self) -> None:
        self._present: set[Waiter] = set()
        self._groups: dict[str, list[Waiter]] = {}
        """Heaps, each with its oldest waiter first; the first one is present."""
        self._heap: list[tuple[int, int, str]] = []
        """Groups as (-admitted, serial of the oldest, key); may be out of date."""
        self._counts: Counter[str] = Counter()
        self._admitted: set[Sequence] = set()

    def add(self, waiter: Waiter) -> None:
        key = waiter.sequence.routing_key
        self._present.add(waiter)
        heappush(self._groups.setdefault(key, []), waiter)
        self._place(key)

    def discard(self, waiter: Waiter) -> None:
        key = waiter.sequence.routing_key
        self._present.remove(waiter)
        group = self._groups[key]
        while group and group[0] not in self._present:
            heappop(group)
        if group:
            self._place(key)
        else:
            del self._groups[key]

    def changed(self, waiter: Waiter) -> None:
        pass

    def first(self) -> Waiter | None:
        while self._heap:
            *place, key = self._heap[0]
            if key in self._groups and tuple(place) == self._where(key):
                return self._groups[key][0]
            heappop(self._heap)
        return None

    def admitted(self, sequence: Sequence) -> None:
        self._admitted.add(sequence)
        self._count(sequence.routing_key, 1)

    def ended(self, sequence: Sequence) -> None:
        if sequence in self._admitted:
            self._admitted.remove(sequence)
            self._count(sequence.routing_key, -1)

    def _count(self, key: str, by: int) -> None:
        if not key:
            return
        self._counts[key] += by
        if not self._counts[key]:
            del self._counts[key]
        if key in self._groups:
            self._place(key)

    def _where(self, key: str) -> tuple[int, int]:
        return -self._counts[key], self._groups[key][0].serial

    def _place(self, key: str) -> None:
        """Where the group belongs from now on."""
        heappush(self._heap, (*self._where(key), key))


class DfsWeightOrder:
    """Depth first through the cached prefixes, the branch with the most waiters first.

    So requests that share a prefix come one after the other, those that share more of it first.
    """

    def __init__(self) -> None:
        self._waiters: dict[Waiter, None] = {}
        self._sorted: list[Waiter] = []
        """Last first; may hold some that have left."""
        self._is_sorted = True

    def add(self, waiter: Waiter) -> None:
        self._waiters[waiter] = None
        self._is_sorted = False

    def discard(self, waiter: Waiter) -> None:
        del self._waiters[waiter]

    def changed(self, waiter: Waiter) -> None:
        self._is_sorted = False

    def first(self) -> Waiter | None:
        if not self._is_sorted:
            self._sorted = depth_first(self._waiters)[::-1]
            self._is_sorted = True
        while self._sorted and self._sorted[-1] not in self._waiters:
            self._sorted.pop()
        return self._sorted[-1] if self._sorted else None

    def admitted(self, sequence: Sequence) -> None:
        pass

    def ended(self, sequence: Sequence) -> None:
        pass


def depth_first(waiters: dict[Waiter, None]) -> list[Waiter]:
    """See `DfsWeightOrder`; branches of equal weight in the order of their earliest waiters."""
    at: dict[Node | None, list[Waiter]] = {}
    for waiter in sorted(waiters):
        at.setdefault(None if waiter.watch is None else waiter.watch.node, []).append(waiter)
    weights: Counter[Node] = Counter()
    branches: dict[Node | None, dict[Node, None]] = {}
    for node, here in at.items():
        while node is not None:
            weights[node] += len(here)
            branches.setdefault(node.parent, {})[node] = None
            node = node.parent
    result: list[Waiter] = []
    stack: list[tuple[Node | None, bool]] = [(None, False)]
    while stack:
        node, is_below_done = stack.pop()
        if is_below_done:
            result += sorted(at.get(node, ()), key=lambda waiter: -waiter.num_cached_blocks)
            continue
        stack.append((node, True))
        below = branches.get(node, {})
        stack += [(branch, False) for branch in sorted(below, key=lambda b: -weights[b])[::-1]]
    return result


def make_order(config: SchedulerConfig) -> WaitingOrder:
    """The order of the configured policy, which is not `fcfs`."""
    match config.waiting_policy:
        case WaitingPolicy.LPM:
            return HeapOrder(lambda waiter: -waiter.num_cached_blocks)
        case WaitingPolicy.DFS_WEIGHT:
            return DfsWeightOrder()
        case WaitingPolicy.LOF:
            return HeapOrder(lambda waiter: -waiter.sequence.sampling.max_tokens)
        case WaitingPolicy.RANDOM:
            seed = config.waiting_seed
            return HeapOrder(lambda waiter: Random(f"{seed}/{waiter.serial}").random())
        case WaitingPolicy.PRIORITY:
            return HeapOrder(lambda waiter: -waiter.sequence.priority)
        case WaitingPolicy.ROUTING_KEY:
            return RoutingKeyOrder()
        case WaitingPolicy.FCFS:
            raise AssertionError("first come, first served needs no order")
