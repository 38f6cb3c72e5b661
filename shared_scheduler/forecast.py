"""How full the pool will become with the sequences that are here, if they end when they are expected to.

Every sequence takes one more block each `block_size` steps and gives all of its blocks back when it ends. So
the need rises until the next one ends, drops, and rises again: the forecast is the highest of these peaks,
which lie just before each end. Reserving the sum of all future output instead would leave much of the pool
idle, because the sequences do not end at the same time.
"""

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]


class PoolForecast:
    """Every sequence as its blocks and the steps until its expected end, latest end first."""

    def __init__(
        self,
        num_tokens: npt.NDArray[np.integer],
        num_blocks: npt.NDArray[np.integer],
        num_steps: npt.NDArray[np.integer],
        *,
        block_size: int,
        num_used: int,
    ) -> None:
        """`num_used`: blocks taken in the pool: less than the sum where sequences share some, more where a
        transfer holds some."""
        self._block_size = block_size
        order = np.argsort(-num_steps, kind="stable")
        self._steps: npt.NDArray[np.integer] = num_steps[order]
        num_held = int(num_blocks.sum())
        self._num_of_others = max(num_used - num_held, 0)
        blocks = num_blocks[order] * min(num_used / max(num_held, 1), 1.0)
        self._blocks: Float64Array = blocks + self._unfilled(num_tokens[order], num_blocks[order])

    def peak(self) -> float:
        """Blocks at the highest point."""
        return self._peak(self._blocks, self._steps)

    def peak_with(self, num_tokens: int, num_blocks: int, num_steps: int) -> float:
        """The highest point with one more sequence, which is not entered."""
        return self._peak(*self._with(num_tokens, num_blocks, num_steps))

    def add(self, num_tokens: int, num_blocks: int, num_steps: int) -> None:
        self._blocks, self._steps = self._with(num_tokens, num_blocks, num_steps)

    def _with(
        self, num_tokens: int, num_blocks: int, num_steps: int
    ) -> tuple[Float64Array, npt.NDArray[np.integer]]:
        at = int(np.searchsorted(-self._steps, -num_steps, side="right"))
        own = num_blocks + self._unfilled(np.array(num_tokens), np.array(num_blocks))
        return np.insert(self._blocks, at, own), np.insert(self._steps, at, num_steps)

    def _unfilled(
        self, num_tokens: npt.NDArray[np.integer], num_blocks: npt.NDArray[np.integer]
    ) -> Float64Array:
        """What turns t more tokens into blocks: ceil((n + t) / size) is at most blocks + this + t / size."""
        beyond: Float64Array = (num_tokens + self._block_size - 1) / self._block_size - num_blocks
        return beyond

    def _peak(self, blocks: Float64Array, steps: npt.NDArray[np.integer]) -> float:
        if not blocks.size:
            return float(self._num_of_others)
        num_alive = np.arange(1, blocks.size + 1)
        need = np.cumsum(blocks) + num_alive * steps / self._block_size
        return float(need.max()) + self._num_of_others
