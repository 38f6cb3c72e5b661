"""What an engine knows of one engine that it reads KV blocks from, or that reads its own."""

from dataclasses import dataclass, field
from typing import Literal

PeerState = Literal["connecting", "ready", "paused", "gone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPeer:
    """Totals are since this engine's start; the other values are those of the last contact."""

    engine_id: str
    """`other`: the sum over engines that were forgotten to keep this list short."""
    control_address: str = ""
    state: PeerState = "gone"
    path: str = ""
    """Transport and lanes, such as `nixl cma/memory tcp/lo`."""
    version: str = ""
    """Of the transport at the prompt engine."""
    latency_s: float = 0.0
    """Of one read of 64 KiB, by the self-test at first contact."""
    rate_bytes_per_s: float = 0.0
    """By the self-test."""
    bytes_read: int = 0
    arrived: int = 0
    fences: int = 0
    quarantined_blocks: int = 0
    """Destination blocks of reads that were given up and did not end at once."""
    leases_by_event: dict[str, int] = field(default_factory=dict)
    """Of a reader, at its prompt engine: granted, renewed, expired, late (released when it was over)."""
    failures_by_reason: dict[str, int] = field(default_factory=dict)
    seconds_by_stage: dict[str, float] = field(default_factory=dict)
    counts_by_stage: dict[str, int] = field(default_factory=dict)
