"""Who may begin now, who waits, and who is told to come back later.

1. arrive   the time of the first token is predicted: the prompt tokens ahead of the request and its own, at
            the rate at which prompts were computed lately
2. refuse   it would come after the deadline, or the queue is full: 429, and when it is worth another try
3. wait     until what is under way leaves room; the highest priority goes first, then who came first
4. begin    the request's prompt tokens are under way until its first token is there, or it ends without one
"""

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from proxy.errors import Overloaded

HALF_LIFE_S = 20.0
"""Of what was seen of the rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    first_token_s: float | None = None
    """Requests that would wait longer for their first token are refused; None: none are."""
    max_tokens_under_way: int | None = None
    """Prompt tokens that engines are given at once; None: all that come."""
    max_waiting: int = 1000


class PrefillRate:
    """Prompt tokens per second of the time in which prompts were under way; older times count less."""

    def __init__(self) -> None:
        self._num_tokens = 0.0
        self._busy_s = 0.0
        self._num_running = 0
        self._seen_s = 0.0

    def begin(self, now_s: float) -> None:
        self._pass_time(now_s)
        self._num_running += 1

    def end(self, now_s: float, num_tokens: int) -> None:
        """A prompt is computed, or given up (0 tokens)."""
        self._pass_time(now_s)
        self._num_running -= 1
        self._num_tokens += num_tokens

    def seconds_for(self, num_tokens: int) -> float:
        """0 while nothing is known."""
        return num_tokens * self._busy_s / self._num_tokens if self._num_tokens else 0.0

    def _pass_time(self, now_s: float) -> None:
        if self._num_running:
            elapsed_s = now_s - self._seen_s
            share = 0.5 ** (elapsed_s / HALF_LIFE_S)
            self._num_tokens *= share
            self._busy_s = self._busy_s * share + elapsed_s
        self._seen_s = now_s


@dataclass(order=True, slots=True)
class _Waiting:
    rank: tuple[int, int]
    """Negative priority, number."""
    num_tokens: int = field(compare=False)
    may_begin: asyncio.Future[None] = field(compare=False)


class Admission:
    """The queue of one proxy."""

    def __init__(self, limits: AdmissionLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._rate = PrefillRate()
        self._numbers = count()
        self._waiting: list[_Waiting] = []
        self._num_under_way = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens_under_way(self) -> int:
        return self._num_under_way

    def predicted_s(self, num_tokens: int, priority: int) -> float:
        """Until the first token of a request that came now."""
        ahead = sum(other.num_tokens for other in self._waiting if -other.rank[0] >= priority)
        return self._rate.seconds_for(self._num_under_way + ahead + num_tokens)

    def enter(self, num_tokens: int, priority: int) -> "Admitted":
        """A request that has begun, or waits for its turn; raises `Overloaded`. Its `end` is to be called."""
        self._refuse_if_hopeless(num_tokens, priority)
        if not self._waiting and self._has_room(num_tokens):
            self._begin(num_tokens)
            return Admitted(self, num_tokens, None)
        may_begin = asyncio.get_running_loop().create_future()
        waiting = _Waiting((-priority, next(self._numbers)), num_tokens, may_begin)
        heapq.heappush(self._waiting, waiting)
        return Admitted(self, num_tokens, waiting)

    def check_invariants(self) -> None:
        """Once nothing is open, nothing waits and nothing is under way."""
        assert not self._waiting
        assert self._num_under_way == 0

    def leave(self, num_tokens: int, *, is_computed: bool) -> None:
        """A request's first token is there, or it has ended."""
        self._num_under_way -= num_tokens
        self._rate.end(self._clock(), num_tokens if is_computed else 0)
        if self._waiting:
            self._let_in()

    def give_up(self, waiting: _Waiting) -> None:
        """It waits no more."""
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            heapq.heapify(self._waiting)
            self._let_in()

    def _refuse_if_hopeless(self, num_tokens: int, priority: int) -> None:
        limits = self._limits
        if len(self._waiting) >= limits.max_waiting:
            raise Overloaded("queue_full", f"{len(self._waiting)} requests are waiting already", 1.0)
        if limits.first_token_s is None:
            return
        predicted_s = self.predicted_s(num_tokens, priority)
        # What is alone here is served, however long it takes: nothing gets faster by waiting.
        if predicted_s > limits.first_token_s and (self._num_under_way or self._waiting):
            late_s = predicted_s - limits.first_token_s
            raise Overloaded(
                "first_token_late",
                f"the first token would come after about {predicted_s:.1f} s, and {limits.first_token_s:g} s "
                "is the limit (--first-token-limit-s)",
                late_s,
            )

    def _has_room(self, num_tokens: int) -> bool:
        limit = self._limits.max_tokens_under_way
        return limit is None or not self._num_under_way or self._num_under_way + num_tokens <= limit

    def _begin(self, num_tokens: int) -> None:
        self._num_under_way += num_tokens
        self._rate.begin(self._clock())

    def _let_in(self) -> None:
        while self._waiting and self._has_room(self._waiting[0].num_tokens):
            first = heapq.heappop(self._waiting)
            if not first.may_begin.cancelled():  # or it is about to leave the queue itself
                self._begin(first.num_tokens)
                first.may_begin.set_result(None)


class Admitted:
    """One request that has begun, or that waits until it may."""

    def __init__(self, admission: Admission, num_tokens: int, waiting: _Waiting | None) -> None:
        """`waiting`: its place in the queue; None where it has begun at once."""
        self._admission = admission
        self._num_tokens = num_tokens
        self._waiting = waiting
        self._is_over = False
        self.has_waited = waiting is not None

    async def turn(self) -> None:
        """Return when it may begin."""
        if self._waiting is not None:
            await self._waiting.may_begin

    def end(self, *, is_computed: bool) -> None:
        """The first token is there, or none will come; only the first call counts."""
        if self._is_over:
            return
        self._is_over = True
        waiting = self._waiting
        if waiting is not None and (waiting.may_begin.cancelled() or not waiting.may_begin.done()):
            self._admission.give_up(waiting)
        else:
            self._admission.leave(self._num_tokens, is_computed=is_computed)
