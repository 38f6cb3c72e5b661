"""Decides from an engine's answers whether it is worth another request: a state machine over given times.

1. closed     requests flow; MAX_FAILURES failures in a row eject the engine
2. open       nothing is sent for a pause, which doubles with every ejection in a row
3. half open  one request is let through: its success closes, its failure opens again; one that ends without
              either, because its client left, makes way for another after TRIAL_S
"""

from dataclasses import dataclass, replace
from typing import Literal

MAX_FAILURES = 5
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
TRIAL_S = 10.0

State = Literal["closed", "open", "half_open"]


@dataclass(frozen=True, slots=True)
class Breaker:
    """One engine's; a value that every event replaces."""

    num_failures: int = 0
    """In a row."""
    pause_s: float = FIRST_PAUSE_S
    open_until_s: float | None = None
    """None: closed."""
    trial_until_s: float = 0.0
    """Until then the one request of the half-open state may be under way."""

    def state(self, now_s: float) -> State:
        if self.open_until_s is None:
            return "closed"
        return "open" if now_s < self.open_until_s else "half_open"

    def lets_through(self, now_s: float) -> bool:
        state = self.state(now_s)
        return state == "closed" or (state == "half_open" and now_s >= self.trial_until_s)

    def on_request(self, now_s: float) -> "Breaker":
        return replace(self, trial_until_s=now_s + TRIAL_S) if self.state(now_s) == "half_open" else self

    def on_success(self) -> "Breaker":
        return self if self == CLOSED else CLOSED

    def on_failure(self, now_s: float) -> "Breaker":
        """Failures of requests sent before the engine was ejected say nothing new."""
        match self.state(now_s):
            case "open":
                return self
            case "closed" if self.num_failures + 1 < MAX_FAILURES:
                return replace(self, num_failures=self.num_failures + 1)
            case "closed":
                return replace(self, num_failures=MAX_FAILURES, open_until_s=now_s + self.pause_s)
            case "half_open":
                pause_s = min(MAX_PAUSE_S, 2 * self.pause_s)
                return replace(self, pause_s=pause_s, open_until_s=now_s + pause_s, trial_until_s=0.0)


CLOSED = Breaker()
