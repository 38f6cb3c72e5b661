"""Where one hand-over stands on the completion side; `sink_ledger` tells how stages follow each other."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from kv_transfer.events import FailReason
from kv_transfer.layout import BlockIds
from kv_transfer.messages import Ending, LeaseRef, Prefix
from kv_transfer.settings import TransferSettings
from kv_transfer.stats import SinkCounters


class Stage(Enum):
    REQUESTED = "requested"
    WAITING = "waiting"
    OFFERED = "offered"
    READING = "reading"
    CONFIRMING = "confirming"
    QUARANTINED = "quarantined"


LEASED = (Stage.OFFERED, Stage.READING)
RENEWED = (Stage.WAITING, *LEASED)
UNCOMPUTED = (Stage.REQUESTED, Stage.WAITING, *LEASED)
"""Stages in which a part of the prompt may not be computed."""

OVERDUE: dict[FailReason, str] = {
    "expired": "the lease was not renewed in time",
    "offer_timeout": "the prompt was not computed before the deadline",
    "read_timeout": "the blocks did not arrive in time",
    "confirm_timeout": "the prompt engine did not confirm in time",
}


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the blocks from `first_block` on go, in sequence order, and the state row."""

    block_ids: BlockIds
    state_slot: int | None
    first_block: int


@dataclass(slots=True)
class Handover:
    handover_id: str
    offer_until_s: float
    """The whole prompt must be computed by then."""
    stage_since_s: float
    prefix: Prefix | None = None
    """What is to be borrowed; None for a prompt that was computed for us."""
    stage: Stage = Stage.REQUESTED
    deadline_s: float = 0.0
    """Of the reads under way, the confirmation or the quarantine."""
    generation: int = 0
    """0 until granted."""
    lease_until_s: float = 0.0
    num_tokens: int = 0
    """Of the whole prompt."""
    remote_ids: BlockIds = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """Of the blocks that are computed, as far as we were told."""
    ending: Ending | None = None
    ended_s: float = 0.0
    """When `ending` came."""
    destination: Destination | None = None
    num_posted_units: int = 0
    """Units of tokens that are being read, were read, or were here before."""
    num_bytes: int = 0
    """Of all reads so far."""
    read_ids: set[int] = field(default_factory=set)
    """Reads that can still write to the destination."""

    @property
    def num_local_blocks(self) -> int:
        return 0 if self.destination is None else int(self.destination.block_ids.size)

    def leave_stage(self, name: str, now_s: float, counters: SinkCounters) -> None:
        counters.add_stage(name, now_s - self.stage_since_s)
        self.stage_since_s = now_s

    def count_read(self, num_bytes: int, now_s: float, settings: TransferSettings, *, is_first: bool) -> None:
        """A read has begun; it shares the link with those before it."""
        others_until_s = 0.0 if is_first else self.deadline_s
        self.num_bytes += num_bytes
        until_s = now_s + settings.read_deadline_s(num_bytes)
        self.deadline_s = max(until_s, others_until_s + num_bytes / settings.min_rate_bytes_per_s)

    def check_invariants(self, *, is_connected: bool) -> None:
        """`is_connected`: the hello is over."""
        has_destination = self.stage in (Stage.READING, Stage.CONFIRMING, Stage.QUARANTINED)
        assert has_destination == (self.destination is not None), self
        assert not self.read_ids or self.stage in (Stage.READING, Stage.QUARANTINED), self
        assert self.read_ids or self.stage is not Stage.QUARANTINED, self
        assert (self.stage is Stage.REQUESTED) == (not is_connected), self
        assert (self.generation == 0) == (self.stage in (Stage.REQUESTED, Stage.WAITING)), self

    def overdue(self, now_s: float) -> FailReason | None:
        """Why it must be given up now, if it must. A quarantined one has been given up already."""
        if self.stage in LEASED and now_s >= self.lease_until_s:
            return "expired"
        if self.ending is None and self.stage in UNCOMPUTED and now_s >= self.offer_until_s:
            return "offer_timeout"
        if self.stage is Stage.READING and self.read_ids and now_s >= self.deadline_s:
            return "read_timeout"
        if self.stage is Stage.CONFIRMING and now_s >= self.deadline_s:
            return "confirm_timeout"
        return None


def leases_of(handovers: Mapping[str, Handover]) -> list[LeaseRef]:
    """What is to be renewed."""
    return [
        LeaseRef(handover.handover_id, handover.generation)
        for handover in handovers.values()
        if handover.stage in RENEWED
    ]


def num_quarantined_blocks(handovers: Mapping[str, Handover]) -> int:
    """Also for other threads than the pump's."""
    quarantined = [each for each in list(handovers.values()) if each.stage is Stage.QUARANTINED]
    return sum(handover.num_local_blocks for handover in quarantined)
