"""Fixed-size states of sequences (convolution, linear attention): one row of memory for each slot.

A row holds the states of all layers one after the other, so that a hand-over moves one contiguous piece.
"""

import hashlib
import math
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from engine.errors import KVPoolError
from engine.kv_pool import allocate

NULL_SLOT = 0
_FLOAT32_BYTES = 4
_ALIGNMENT = 16
"""Numbers: every state begins at a multiple of 64 bytes."""
_LONGEST_TEXT = 200


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Shapes of the float32 states in one row, in order."""

    shapes: tuple[tuple[int, ...], ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each state begins, and behind them where the row ends."""
        offsets = [0]
        for shape in self.shapes:
            offsets.append(offsets[-1] + -(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT)
        return tuple(offsets)

    @property
    def row_bytes(self) -> int:
        return self.offsets[-1] * _FLOAT32_BYTES

    def views(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Each state of `rows` [n, row] as [n, *shape]; no copy."""
        return [
            rows[:, offset : offset + math.prod(shape)].view(-1, *shape)
            for offset, shape in zip(self.offsets, self.shapes, strict=False)
        ]

    def __str__(self) -> str:
        """Equal texts mean exchangeable rows."""
        runs = [("x".join(map(str, shape)), len(list(run))) for shape, run in groupby(self.shapes)]
        text = "; ".join(text if count == 1 else f"{count}*{text}" for text, count in runs)
        if len(text) > _LONGEST_TEXT:
            text = f"{len(self.shapes)} states, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"
        return f"float32[{text}]"


class StatePool:
    """`num_slots` rows in one contiguous huge-page region. Slot 0 is the null slot: no sequence has it."""

    def __init__(self, layout: StateLayout, num_slots: int) -> None:
        if num_slots < 2:
            raise KVPoolError(
                f"the state pool needs 2 slots of {layout.row_bytes} bytes, one of them the null slot, and "
                f"gets {num_slots}; raise --state-bytes"
            )
        self.layout = layout
        self.num_slots = num_slots
        self._region = allocate(num_slots * layout.row_bytes, "state pool", "--state-bytes")
        self.rows = torch.from_numpy(self._region.buffer.view(np.float32)).view(num_slots, -1)
        """float32 [num_slots, row]"""

    @property
    def address(self) -> int:
        return self._region.address

    @property
    def row_bytes(self) -> int:
        return self.layout.row_bytes

    def copy_slot(self, source: int, destination: int) -> None:
        self.rows[destination].copy_(self.rows[source])

    def zero_slot(self, slot: int) -> None:
        self.rows[slot].zero_()

    def check_invariants(self) -> None:
        assert self.rows.data_ptr() == self.address
        assert self.rows.is_contiguous()
        assert not self.rows[NULL_SLOT].any(), "something was written to the null slot"
