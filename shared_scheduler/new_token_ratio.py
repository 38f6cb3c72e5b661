"""How much of what it may still generate a sequence is expected to generate: one number for an engine."""

import math
from collections.abc import Iterable

START = 1.0
"""Until anything is known, a sequence is expected to use all of its `max_tokens`."""
STEPS_AHEAD = 20
"""After a retraction every sequence is expected to generate so many tokens more than it has."""
MEMORY = 256
"""Ended sequences that the floor remembers, about."""


class NewTokenRatio:
    """Starts at 1, falls with every decode step to a floor, and jumps up after a retraction.

    The floor is what sequences that ended by themselves have shown, never below the configured one: of a
    sequence met at a random step, the share of the remaining limit that it still generated. (The mean of
    generated / limit would be too low: who runs is longer than the average of those who came.)
    """

    def __init__(self, floor: float, decay_steps: int) -> None:
        self._lowest = floor
        self._decay = (START - floor) / decay_steps
        self._value = START
        # Sums over ended sequences and all of their steps, the older the lighter.
        self._num_steps = 0.0
        self._num_remaining = 0.0
        self._num_allowed = 0.0
        self._squared_error = 0.0

    @property
    def value(self) -> float:
        return self._value

    @property
    def floor(self) -> float:
        return max(self._lowest, self._shown)

    @property
    def _shown(self) -> float:
        """What ended requests have shown, also below the lowest floor."""
        return self._num_remaining / self._num_allowed if self._num_allowed else self._lowest

    @property
    def spread(self) -> float:
        """Standard deviation of what a sequence still generated around what was foretold, in tokens."""
        return math.sqrt(self._squared_error / self._num_steps) if self._num_steps else 0.0

    def decode_step(self) -> None:
        self._value = max(self._value - self._decay, self.floor)

    def ended(self, num_generated: int, limit: int) -> None:
        """A sequence ended by itself after so many of the output tokens it was allowed."""
        length, fade = num_generated, 1 - 1 / MEMORY
        self._num_steps = self._num_steps * fade + length
        self._num_remaining = self._num_remaining * fade + length**2 / 2
        self._num_allowed = self._num_allowed * fade + length * limit - length**2 / 2
        # After g tokens it still generated length - g, and ratio * (limit - g) was foretold; summed over g.
        # Not the floor: where that is higher, the expected ends already are, and need no spread on top.
        ratio = self._shown
        off, slope = length - ratio * limit, 1 - ratio
        error = off**2 * length - off * slope * length**2 + slope**2 * length**3 / 3
        self._squared_error = self._squared_error * fade + error

    def retracted(self, generated_and_limit: Iterable[tuple[int, int]]) -> None:
        """Too many were admitted: estimate again from those that run, victims included."""
        pairs = list(generated_and_limit)
        num_generated = sum(generated + STEPS_AHEAD for generated, _ in pairs)
        num_allowed = sum(limit for _, limit in pairs)
        if num_allowed:
            self._value = min(max(num_generated / num_allowed, self._value), START)
