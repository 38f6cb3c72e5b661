"""Changes to some logits of some rows before tokens are drawn from them; the other rows cost nothing.

Order, as in OpenAI's and vLLM's definitions: biases, penalties, then what may not be drawn at all. The
repetition penalty counts prompt and output, presence and frequency penalties count the output alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from wire.sampling import SamplingParams

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

ApplyBitmask = Callable[[torch.Tensor, torch.Tensor], None]
"""Sets to -inf, in logits float32 [M, vocab], what bitmask int32 [M, vocab / 32] does not allow."""


@dataclass(slots=True)
class _Entries:
    """Single logits: parts of equal length, one after the other."""

    rows: list[int] = field(default_factory=list)
    token_ids: list[Int64Array] = field(default_factory=list)

    def add(self, row: int, token_ids: Int64Array) -> None:
        self.rows.append(row)
        self.token_ids.append(token_ids)

    def spread(self, values: list[float]) -> torch.Tensor:
        """One value per part, repeated for each of its entries."""
        return torch.from_numpy(np.repeat(np.array(values, np.float32), [ids.size for ids in self.token_ids]))

    def index(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = np.repeat(np.array(self.rows, np.int64), [ids.size for ids in self.token_ids])
        return torch.from_numpy(rows), torch.from_numpy(np.concatenate(self.token_ids))


class LogitEdits:
    """The changes of one step; `apply_` makes them."""

    def __init__(self) -> None:
        self._biased, self._biases = _Entries(), list[Float32Array]()
        self._penalised, self._counts = _Entries(), list[Float32Array]()
        self._penalties: list[SamplingParams] = []
        self._banned = _Entries()
        self._masked_rows: list[int] = []
        self._masks: list[torch.Tensor] = []
        self._apply_bitmask: ApplyBitmask | None = None

    def bias(self, row: int, token_ids: Int64Array, biases: Float32Array) -> None:
        self._biased.add(row, token_ids)
        self._biases.append(biases)

    def penalise(
        self, row: int, token_ids: Int64Array, counts: Float32Array, sampling: SamplingParams
    ) -> None:
        """`token_ids`: those seen in prompt or output; `counts`: how often each is in the output."""
        self._penalised.add(row, token_ids)
        self._counts.append(counts)
        self._penalties.append(sampling)

    def ban(self, row: int, token_ids: Int64Array) -> None:
        self._banned.add(row, token_ids)

    def mask(self, row: int, bitmask: torch.Tensor, apply: ApplyBitmask) -> None:
        """`bitmask` int32 [vocab / 32]: bit 1 for what may be drawn."""
        self._masked_rows.append(row)
        self._masks.append(bitmask)
        self._apply_bitmask = apply

    def rows(self) -> Int64Array:
        """Those that are changed, ascending."""
        changed = (self._biased.rows, self._penalised.rows, self._banned.rows, self._masked_rows)
        return np.unique(np.array([row for rows in changed for row in rows], np.int64))

    def apply_(self, logits: torch.Tensor) -> None:
        """`logits` float32 [R, vocab]."""
        if self._biased.rows:
            biases = torch.from_numpy(np.concatenate(self._biases))
            logits.index_put_(self._biased.index(), biases, accumulate=True)
        if self._penalised.rows:
            self._penalise_(logits)
        if self._banned.rows:
            logits[self._banned.index()] = -torch.inf
        if self._apply_bitmask is not None:
            rows = torch.tensor(self._masked_rows)
            some = logits[rows]
            self._apply_bitmask(some, torch.stack(self._masks))
            logits[rows] = some

    def _penalise_(self, logits: torch.Tensor) -> None:
        entries, params = self._penalised, self._penalties
        index, counts = entries.index(), torch.from_numpy(np.concatenate(self._counts))
        repetition = entries.spread([p.repetition_penalty for p in params])
        values = logits[index]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= entries.spread([p.frequency_penalty for p in params]) * counts
        values -= entries.spread([p.presence_penalty for p in params]) * (counts > 0)
        logits[index] = values
