"""The sink's side of the hello with one prompt engine process: what to say, and what the answers mean.

1. *Hello*: protocol version and compatibility fields, nothing else.
2. *Introduce*, on `HelloOk`: who we are, whom we expect, which transport.
3. *Opened*, on an `Introduction` that fits: the transport is connected to the source's memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.errors import LayoutError, ReadError
from kv_transfer.events import FailReason
from kv_transfer.kv_paths import KvPlan, plan_kv
from kv_transfer.layout import Identity, Region
from kv_transfer.messages import PROTOCOL_VERSION, Hello, Introduce, Introduction, Refused
from kv_transfer.sink_checks import difference_to, region_index
from kv_transfer.transport import Connection, RemoteMemory, Transport
from wire.services import PromptEngineAddress


@dataclass(frozen=True, slots=True)
class Opened:
    """The hello is over."""

    connection: Connection
    regions: tuple[Region, ...]
    """The source's, in its blocks."""
    plan: KvPlan
    lease_s: float
    version: str
    """Of the transport at the source."""


@dataclass(frozen=True, slots=True)
class Unusable:
    """Nothing can be read from this peer, and why."""

    reason: FailReason
    message: str


class SinkHello:
    def __init__(
        self,
        address: PromptEngineAddress,
        identity: Identity,
        regions: Sequence[Region],
        transport: Transport,
    ) -> None:
        self._address = address
        self._identity = identity
        self._regions = tuple(regions)
        self._transport = transport

    def hello(self) -> Hello:
        return Hello(self._address.epoch, PROTOCOL_VERSION, dict(self._identity.compatibility))

    def introduce(self) -> Introduce:
        return Introduce(
            epoch=self._address.epoch,
            engine_id=self._address.engine_id,
            reader_engine_id=self._identity.engine_id,
            reader_epoch=self._identity.epoch,
            transport=self._transport.name,
            transport_version=self._transport.version,
        )

    def refused(self, message: Refused) -> Unusable:
        if message.field == "session":
            return Unusable("peer_lost", "it does not know this session any more")
        return _mismatch(message.field, message.ours, message.theirs)

    def other_epoch(self, epoch: int) -> Unusable:
        return _mismatch("epoch", str(epoch), str(self._address.epoch))

    def open(self, message: Introduction) -> Opened | Unusable:
        """Connect the transport, if this is the engine that is expected and its memory fits ours."""
        difference = difference_to(message, self._address.engine_id, self._transport.name, self._regions)
        if difference is not None:
            return _mismatch(*difference)
        regions = tuple(
            Region(info.kind, info.address, info.block_bytes, info.num_blocks, device_id=info.device_id)
            for info in message.regions
        )
        try:
            plan = plan_kv(regions, self._regions, self._identity.block_size)
        except LayoutError as error:
            return Unusable("incompatible", str(error))
        if plan is None:
            ours, theirs = (each[region_index(each, "kv")] for each in (self._regions, regions))
            return _mismatch("block_size", f"{theirs.block_bytes} bytes", f"{ours.block_bytes} bytes")
        memory = RemoteMemory(message.blob, plan.remote, self._address.control_address, plan.sources)
        try:
            connection = self._transport.connect(memory, plan.local)
        except ReadError as error:
            return Unusable("connect_failed", str(error))
        return Opened(connection, regions, plan, message.lease_s, message.transport_version)


def _mismatch(field: str, theirs: str, ours: str) -> Unusable:
    reason: FailReason = "wrong_engine" if field in ("engine_id", "epoch") else "incompatible"
    message = f"{field} is {theirs} there and {ours} here"
    return Unusable(reason, message + _remedy(theirs, ours) if field == "transport" else message)


def _remedy(theirs: str, ours: str) -> str:
    """Which side to change: NIXL may be the only transport for one's memory, as for a GPU's."""
    if "nixl" not in (theirs, ours):
        return "; start both engines with the same --transport"
    side = "this engine" if theirs == "nixl" else "the other engine"
    return f"; start {side} with --transport nixl"
