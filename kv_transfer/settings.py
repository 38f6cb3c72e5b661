"""Time-outs and limits of the hand-over, in one place."""

from dataclasses import dataclass, fields

from kv_transfer.errors import SettingsError

_UNLIMITED = ("advertise_host", "allowed_networks", "require_rdma", "verify_kv")
"""Fields that are no amounts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    """Both sides take the same settings; each comment says who uses the field. Every value must be > 0."""

    lease_s: float = 10.0
    """Source: how long blocks stay pinned without a word from a reader. Readers renew every sixth of it."""
    connect_timeout_s: float = 3.0
    """Sink: from first contact to the end of the hello."""
    refused_timeout_s: float = 1.0
    """Sink: how long a refused TCP connection is tried again."""
    offer_timeout_s: float = 120.0
    """Sink: how long to wait for the prompt engine's offer when the request brings no deadline."""
    read_timeout_s: float = 5.0
    """Sink: time allowed for any read, to which bytes / min_rate_bytes_per_s is added."""
    min_rate_bytes_per_s: float = 50e6
    confirm_timeout_s: float = 3.0
    """Sink: from the release to the source's confirmation."""
    fence_after_s: float = 7.0
    """Sink: a read still running this long after it was given up costs the peer its connection."""
    self_test_timeout_s: float = 3.0
    """Sink: from the end of the hello to the end of the first contact's self-test."""
    min_self_test_bytes_per_s: float = 100e6
    """Sink: a self-test below this rate is a warning."""
    require_rdma: bool = False
    """Sink: a peer that is not read over RDMA is not read at all."""
    verify_kv: bool = False
    """Source: send digests of all tokens. Sink: compare them with what arrived; without them nothing is
    believed."""
    breaker_failures: int = 3
    """Sink: a peer that fails this often in a row is left alone for a pause."""
    breaker_pause_s: float = 0.25
    breaker_max_pause_s: float = 3.0
    """Sink: first and longest pause; it doubles in between."""
    heartbeat_interval_s: float = 0.5
    heartbeat_timeout_s: float = 1.5
    """Both: silence on the control connection after which the peer counts as dead."""
    max_handovers: int = 4096
    """Both: hand-overs known at one time."""
    max_peers: int = 1024
    """Both: peers known at one time."""
    max_blocks: int = 65536
    """Both: blocks in one hand-over."""
    allowed_networks: tuple[str, ...] = ()
    """Source: who may connect to the control port, such as `10.0.0.0/8`; none: everybody."""
    advertise_host: str | None = None
    """Source: host in `control_address` when it is bound to a wildcard."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name not in _UNLIMITED and not value > 0:
                raise SettingsError(f"{item.name} must be positive, got {value}")
        if self.heartbeat_timeout_s <= self.heartbeat_interval_s:
            raise SettingsError(
                f"heartbeat_timeout_s must be longer than heartbeat_interval_s "
                f"({self.heartbeat_interval_s}), got {self.heartbeat_timeout_s}"
            )

    @property
    def renew_interval_s(self) -> float:
        return self.lease_s / 6

    def read_deadline_s(self, num_bytes: int) -> float:
        return self.read_timeout_s + num_bytes / self.min_rate_bytes_per_s
