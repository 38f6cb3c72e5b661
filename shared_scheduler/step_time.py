"""How long a decode step takes, fitted from steps that were measured."""

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

FORGETTING = 0.98
"""Weight of an observation after one newer one: the fit follows about the last 50 steps."""


MIN_SEEN = 3
"""Steps of one shape after which their mean counts, instead of the lines."""
MEAN_STEPS = 20
"""Steps that a mean looks back, about."""


class StepTimeModel:
    """Step seconds = forward(graph size) + sampler(sequences), each a line with non-negative slope.

    Of shapes that were seen often enough the mean of the last steps counts: computing two rows can cost twice
    as much as one, and as much as five, which no line says.

    `graph_sizes`, ascending: token counts for which the worker has a captured graph; a step is padded to the
    next one. Empty: no padding.
    """

    def __init__(self, graph_sizes: tuple[int, ...] = ()) -> None:
        self._graph_sizes = graph_sizes
        self._forward = _Line()
        self._sampler = _Line()
        self._means: dict[tuple[int, int], tuple[int, float]] = {}
        """By sequences and graph size: how many steps, at most MEAN_STEPS, and their mean."""

    @property
    def is_fitted(self) -> bool:
        return self._forward.is_fitted

    @property
    def is_measured(self) -> bool:
        return bool(self._means)

    def observe(self, num_sequences: int, num_tokens: int, forward_s: float, sampler_s: float) -> None:
        size = self.graph_size(num_tokens)
        self._forward.add(size, forward_s)
        self._sampler.add(num_sequences, sampler_s)
        num_seen, mean = self._means.get((num_sequences, size), (0, 0.0))
        num_seen = min(num_seen + 1, MEAN_STEPS)
        self._means[num_sequences, size] = num_seen, mean + (forward_s + sampler_s - mean) / num_seen

    def predict_s(self, num_sequences: int, num_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Seconds for each of the token counts."""
        padded = [self.graph_size(count) for count in num_tokens.tolist()]
        sizes = np.array(padded, np.float64)
        lines = self._forward.at(sizes) + self._sampler.at(np.full(sizes.size, num_sequences, np.float64))
        means = (self._means.get((num_sequences, size), (0, 0.0)) for size in padded)
        known = ((place, mean) for place, (num_seen, mean) in enumerate(means) if num_seen >= MIN_SEEN)
        for place, mean in known:
            lines[place] = max(mean, 1e-9)
        return lines

    def graph_size(self, num_tokens: int) -> int:
        index = bisect_left(self._graph_sizes, num_tokens)
        return self._graph_sizes[index] if index < len(self._graph_sizes) else num_tokens


class _Line:
    """Least squares with exponential forgetting; both coefficients are kept at or above zero."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # weight, x, y, x*x, x*y

    @property
    def is_fitted(self) -> bool:
        """Two different x were seen."""
        weight, x, _, xx, _ = self._sums
        return bool(weight * xx - x * x > 1e-9 * max(weight * xx, 1e-30))

    def add(self, x: float, y: float) -> None:
        self._sums = FORGETTING * self._sums + np.array([1.0, x, y, x * x, x * y])

    def at(self, x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        weight, sum_x, sum_y, sum_xx, sum_xy = self._sums.tolist()
        if not weight:
            return np.zeros_like(x)
        slope = 0.0
        if self.is_fitted:
            slope = max(0.0, (weight * sum_xy - sum_x * sum_y) / (weight * sum_xx - sum_x * sum_x))
        start = (sum_y - slope * sum_x) / weight
        if start < 0.0:
            start, slope = 0.0, sum_xy / sum_xx
        return np.maximum(start + slope * x, 1e-9)
