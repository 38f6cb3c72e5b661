"""A clock for either end of a hand-over that tests set: what it times out depends on no machine's speed."""

import time


class JumpingClock:
    """Jumps when it is told to; stands still in between unless it `runs`."""

    def __init__(self, *, runs: bool = False) -> None:
        self._runs = runs
        self._jumped_s = 0.0

    def __call__(self) -> float:
        return self._jumped_s + (time.monotonic() if self._runs else 0.0)

    def jump(self, seconds: float) -> None:
        self._jumped_s += seconds
