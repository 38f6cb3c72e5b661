"""How long a decode step takes, fitted from steps that were measured."""

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

FORGETTING = 0.98
"""Weight of an observation after one newer one: the fit follows about the last 50 steps."""


class StepTimeModel:
    """Step seconds = forward(graph size) + sampler(sequences), each a line with non-negative slope.

    `graph_sizes`, ascending: token counts for which the worker has a captured graph; a step is padded to the
    next one. Empty: no padding.
    """

    def __init__(self, graph_sizes: tuple[int, ...] = ()) -> None:
        self._graph_sizes = graph_sizes
        self._forward = _Line()
        self._sampler = _Line()

    @property
    def is_fitted(self) -> bool:
        return self._forward.is_fitted

    def observe(self, num_sequences: int, num_tokens: int, forward_s: float, sampler_s: float) -> None:
        self._forward.add(self.graph_size(num_tokens), forward_s)
        self._sampler.add(num_sequences, sampler_s)

    def predict_s(self, num_sequences: int, num_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Seconds for each of the token counts."""
        sizes = np.array([self.graph_size(count) for count in num_tokens.tolist()], np.float64)
        return self._forward.at(sizes) + self._sampler.at(np.full(sizes.size, num_sequences, np.float64))

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
