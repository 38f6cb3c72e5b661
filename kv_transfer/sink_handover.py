"""Where one hand-over stands on the completion side; `sink_ledger` tells how stages follow each other."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from kv_transfer.events import FailReason
from kv_transfer.layout import BlockIds


class Stage(Enum):
    REQUESTED = "requested"
    WAITING = "waiting"
    OFFERED = "offered"
    READING = "reading"
    CONFIRMING = "confirming"
    QUARANTINED = "quarantined"


LEASED = (Stage.OFFERED, Stage.READING)
RENEWED = (Stage.WAITING, *LEASED)

_REASON_AT_DEADLINE: dict[Stage, FailReason] = {
    Stage.REQUESTED: "offer_timeout",
    Stage.WAITING: "offer_timeout",
    Stage.READING: "read_timeout",
    Stage.CONFIRMING: "confirm_timeout",
}

OVERDUE: dict[FailReason, str] = {
    "expired": "the lease was not renewed in time",
    "offer_timeout": "the prompt was not computed before the deadline",
    "read_timeout": "the blocks did not arrive in time",
    "confirm_timeout": "the prompt engine did not confirm in time",
}


@dataclass(slots=True)
class Handover:
    handover_id: str
    deadline_s: float
    """Of the present stage; an offered hand-over waits for the engine and has only its lease."""
    stage_since_s: float
    stage: Stage = Stage.REQUESTED
    generation: int = 0
    """0 until granted."""
    lease_until_s: float = 0.0
    remote_ids: BlockIds = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    remote_slot: int | None = None
    read_ids: set[int] = field(default_factory=set)
    """Reads that can still write to the destination."""
    num_bytes: int = 0
    num_local_blocks: int = 0

    def overdue(self, now_s: float) -> FailReason | None:
        """Why it must be given up now, if it must. A quarantined one has been given up already."""
        if self.stage in LEASED and now_s >= self.lease_until_s:
            return "expired"
        return _REASON_AT_DEADLINE.get(self.stage) if now_s >= self.deadline_s else None
