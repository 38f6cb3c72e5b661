"""Where one hand-over stands on the prompt side; `source_ledger` tells how stages follow each other."""

import math
from dataclasses import dataclass
from typing import TypeAlias

from kv_transfer.events import EndReason
from kv_transfer.layout import BlockIds
from kv_transfer.messages import Ending

ReaderId: TypeAlias = bytes


@dataclass(slots=True)
class Pinned:
    handover_id: str
    num_tokens: int
    block_ids: BlockIds
    """Of what is computed."""
    ending: Ending | None
    """None while it grows."""
    expires_s: float
    generation: int = 0
    reader: ReaderId | None = None
    withdrawn: bool = False
    attempt: int = 0
    """At computing the prompt: what was announced of another one is void."""

    def hold(self, reader: ReaderId, generation: int, until_s: float) -> None:
        self.reader, self.generation, self.expires_s = reader, generation, until_s

    def let_go(self, until_s: float) -> None:
        """No reader has it; what grows needs no lease."""
        self.reader, self.generation = None, 0
        self.expires_s = math.inf if self.ending is None else until_s


@dataclass(slots=True)
class Waiter:
    reader: ReaderId
    expires_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    reason: EndReason
    generation: int
    offered: bool
