"""Plain counters of both sides; the engine exports them."""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field, fields
from typing import Literal

LeaseEvent = Literal["granted", "renewed", "expired", "late"]
"""`late`: released by a reader that did not hold it any more."""

MAX_READERS = 64
"""Whose leases are counted one by one; those heard of longest ago are forgotten."""


@dataclass(frozen=True, slots=True)
class SourceStats:
    """A moment's state (`num_*`) and totals since start (the rest)."""

    num_pinned: int
    num_waiting: int
    num_peers: int
    announcements: int
    """Of chunks, before the offer."""
    offers: int
    ends_by_reason: dict[str, int]
    refusals_by_field: dict[str, int]
    """Readers that were turned away: what differed, `address` of those outside the allowed networks."""
    leases_granted: int
    leases_renewed: int
    leases_expired: int
    late_releases: int
    ignored_by_kind: dict[str, int]
    """Messages that had no effect: invalid, stale, duplicate, unknown, hello, full."""
    internal_errors: int


@dataclass(frozen=True, slots=True)
class SinkStats:
    """A moment's state (`num_*`) and totals since start (the rest)."""

    num_handovers: int
    num_peers: int
    num_quarantined_blocks: int
    num_paused_peers: int
    """Peers that failed several times in a row."""
    requests: int
    arrived: int
    abandoned: int
    failures_by_reason: dict[str, int]
    bytes_read: int
    blocks_read: int
    bytes_skipped: int
    """Of blocks that the reader had already, in hand-overs that arrived."""
    blocks_skipped: int
    renewals: int
    fences: int
    quarantined_blocks: int
    seconds_by_stage: dict[str, float]
    """wait (request to first announcement), queue (that to pull), read (pull to last byte), tail (last
    announcement to last byte), confirm; summed over `counts_by_stage`."""
    counts_by_stage: dict[str, int]
    ignored_by_kind: dict[str, int]
    """Messages that had no effect: invalid, stale, duplicate, unknown."""
    internal_errors: int


@dataclass(slots=True)
class SourceCounters:
    """Written by the pump thread only."""

    announcements: int = 0
    offers: int = 0
    leases_granted: int = 0
    leases_renewed: int = 0
    leases_expired: int = 0
    late_releases: int = 0
    internal_errors: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    leases_by_peer: OrderedDict[str, Counter[str]] = field(default_factory=OrderedDict)
    """Reader's engine id to what happened to its leases, the reader heard of last at the end."""

    def count_lease(self, peer: str, event: LeaseEvent) -> None:
        counts = self.leases_by_peer.setdefault(peer, Counter())
        counts[event] += 1
        self.leases_by_peer.move_to_end(peer)
        if len(self.leases_by_peer) > MAX_READERS:
            self.leases_by_peer.popitem(last=False)


@dataclass(slots=True)
class SinkCounters:
    """Written by the pump thread only."""

    requests: int = 0
    arrived: int = 0
    abandoned: int = 0
    bytes_read: int = 0
    blocks_read: int = 0
    bytes_skipped: int = 0
    blocks_skipped: int = 0
    renewals: int = 0
    fences: int = 0
    quarantined_blocks: int = 0
    internal_errors: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    stage_s: dict[str, float] = field(default_factory=dict)
    stage_counts: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)

    def add(self, other: "SinkCounters") -> None:
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, dict):
                for key, value in list(theirs.items()):
                    mine[key] = mine.get(key, 0) + value
            else:
                setattr(self, item.name, mine + theirs)

    def add_arrival(self, num_skipped_blocks: int, block_bytes: int) -> None:
        """`num_skipped_blocks` were here before, of `block_bytes` each."""
        self.arrived += 1
        self.blocks_skipped += num_skipped_blocks
        self.bytes_skipped += num_skipped_blocks * block_bytes

    def add_stage(self, stage: str, seconds: float) -> None:
        self.stage_s[stage] = self.stage_s.get(stage, 0.0) + seconds
        self.stage_counts[stage] += 1
