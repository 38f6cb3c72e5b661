"""What one API key may use: requests per second, with a burst, and requests at once."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from proxy.errors import Overloaded

MAX_KEYS = 10_000
"""Remembered; those that were used least lately are forgotten, if they have nothing open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    requests_per_s: float | None = None
    burst: int = 20
    """Requests that may come at once after a pause."""
    max_open: int | None = None

    @property
    def are_set(self) -> bool:
        return self.requests_per_s is not None or self.max_open is not None


@dataclass(slots=True)
class Use:
    """Of one key."""

    num_allowed: float
    """Requests that may come now."""
    seen_s: float
    num_open: int = 0


class KeyGate(Protocol):
    """Lets the requests of a key in, or not."""

    def open(self, key: str) -> AbstractContextManager[None]:
        """Raises `Overloaded` where the key has used up what it may; the request ends with the context."""
        ...


def refill(use: Use, limits: KeyLimits, now_s: float) -> None:
    """More requests may come the longer the last look is past."""
    elapsed_s, use.seen_s = now_s - use.seen_s, now_s
    if limits.requests_per_s is not None:
        use.num_allowed = min(limits.burst, use.num_allowed + elapsed_s * limits.requests_per_s)


def check(use: Use, limits: KeyLimits) -> None:
    """Take one of the requests that may come now; `Overloaded` where there is none."""
    if limits.max_open is not None and use.num_open >= limits.max_open:
        raise Overloaded("key_open", f"this key has {use.num_open} requests open, its limit", 1.0)
    if limits.requests_per_s is None:
        return
    if use.num_allowed < 1.0:
        message = f"this key may send {limits.requests_per_s:g} requests a second"
        raise Overloaded("key_rate", message, (1.0 - use.num_allowed) / limits.requests_per_s)
    use.num_allowed -= 1.0


class NoLimits:
    """Lets everybody in, and counts nothing."""

    def __init__(self) -> None:
        self._nothing = nullcontext()

    def open(self, key: str) -> AbstractContextManager[None]:
        return self._nothing


class KeyUse:
    """Counts by key; all requests without one share one count."""

    def __init__(self, limits: KeyLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._uses: OrderedDict[str, Use] = OrderedDict()

    @contextmanager
    def open(self, key: str) -> Iterator[None]:
        """Raises `Overloaded` where the key has used up what it may."""
        use = self._use(key)
        check(use, self._limits)
        use.num_open += 1
        try:
            yield
        finally:
            use.num_open -= 1

    def _use(self, key: str) -> Use:
        now_s = self._clock()
        use = self._uses.get(key)
        if use is None:
            use = self._uses[key] = Use(float(self._limits.burst), now_s)
            self._forget_some()
        refill(use, self._limits, now_s)
        self._uses.move_to_end(key)
        return use

    def _forget_some(self) -> None:
        if len(self._uses) > MAX_KEYS:
            idle = next((key for key, use in self._uses.items() if not use.num_open), None)
            if idle is not None:
                del self._uses[idle]
