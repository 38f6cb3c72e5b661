"""What an autoscaler looks at: how much prompt waits here and for how long, how far tokens are apart.

Figures of the recent past: what was seen counts half after `HALF_LIFE_S` (of rates: of busy time, so that a
pause does not forget how fast the engine is).
"""

from bisect import bisect_left
from collections.abc import Callable

from engine.ipc import EngineStats

HALF_LIFE_S = 20.0
BOUNDS_S = tuple(0.001 * 1.25**step for step in range(48))
"""Upper ends of the intervals' buckets, up to 36 s; a quantile is right within a quarter."""
SHARE_FOR_QUANTILE = 0.9


class ScalingSignals:
    """Told of a service's requests and of what its engine brings; survives a restart of the engine."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queued: dict[str, int] = {}
        """Prompt tokens of requests that have no token yet."""
        self._num_queued_tokens = 0
        self._last_token_s: dict[str, float] = {}
        self._rate = PromptRate()
        self._intervals = RecentIntervals()

    @property
    def num_queued_tokens(self) -> int:
        return self._num_queued_tokens

    @property
    def predicted_first_token_s(self) -> float:
        """When a prompt that comes now could have its first token, beside its own computation."""
        return self._rate.seconds_for(self._num_queued_tokens)

    @property
    def inter_token_p90_s(self) -> float:
        """0 where no tokens came lately."""
        return self._intervals.quantile(SHARE_FOR_QUANTILE, self._clock())

    def begin(self, request_id: str, num_prompt_tokens: int) -> None:
        """A request was sent to the engine; 0 where another engine computes its prompt."""
        self._queued[request_id] = num_prompt_tokens
        self._num_queued_tokens += num_prompt_tokens

    def end(self, request_id: str) -> None:
        """Nothing more is expected of it; idempotent."""
        self._num_queued_tokens -= self._queued.pop(request_id, 0)
        self._last_token_s.pop(request_id, None)

    def on_step(self, request_ids: list[str]) -> None:
        """These requests got tokens, all now; one that has ended since is ignored."""
        now_s = self._clock()
        for request_id in request_ids:
            last_s = self._last_token_s.get(request_id)
            if last_s is not None:
                if now_s > last_s:  # choices of one request come together
                    self._intervals.add(now_s - last_s, now_s)
                    self._last_token_s[request_id] = now_s
            elif request_id in self._queued:
                self._num_queued_tokens -= self._queued[request_id]
                self._queued[request_id] = 0
                self._last_token_s[request_id] = now_s

    def on_stats(self, stats: EngineStats) -> None:
        self._rate.update(stats.num_prompt_tokens + stats.num_cache_hit_tokens, stats.busy_s)

    def check_invariants(self) -> None:
        assert self._num_queued_tokens == sum(self._queued.values())
        assert self._last_token_s.keys() <= self._queued.keys()


class PromptRate:
    """Prompt tokens dealt with, computed or found in the cache, per second that the engine was busy."""

    def __init__(self) -> None:
        self._seen = (0, 0.0)
        self._num_tokens = 0.0
        self._busy_s = 0.0

    def update(self, total_tokens: int, total_busy_s: float) -> None:
        """Running totals; smaller ones than before are a new engine's."""
        num_tokens, busy_s = total_tokens - self._seen[0], total_busy_s - self._seen[1]
        if num_tokens < 0 or busy_s < 0:
            num_tokens, busy_s = total_tokens, total_busy_s
        self._seen = (total_tokens, total_busy_s)
        # Steps without a prompt say nothing of how fast prompts are.
        if num_tokens and busy_s:
            share = 0.5 ** (busy_s / HALF_LIFE_S)
            self._num_tokens = self._num_tokens * share + num_tokens
            self._busy_s = self._busy_s * share + busy_s

    def seconds_for(self, num_tokens: int) -> float:
        """0 while nothing is known."""
        return num_tokens * self._busy_s / self._num_tokens if self._num_tokens else 0.0


class RecentIntervals:
    """A histogram that forgets."""

    def __init__(self) -> None:
        self._weights = [0.0] * (len(BOUNDS_S) + 1)
        self._faded_s = 0.0

    def add(self, seconds: float, now_s: float) -> None:
        if now_s - self._faded_s >= 1.0:
            self._fade(now_s)
        self._weights[bisect_left(BOUNDS_S, seconds)] += 1.0

    def quantile(self, share: float, now_s: float) -> float:
        """The upper end of the bucket in which it lies; 0 where less than one interval is remembered."""
        self._fade(now_s)
        total = sum(self._weights)
        if total < 1.0:
            return 0.0
        below = 0.0
        for bound_s, weight in zip(BOUNDS_S, self._weights, strict=False):
            below += weight
            if below >= share * total:
                return bound_s
        return BOUNDS_S[-1]

    def _fade(self, now_s: float) -> None:
        left = 0.5 ** ((now_s - self._faded_s) / HALF_LIFE_S)
        self._weights = [weight * left for weight in self._weights]
        self._faded_s = now_s
