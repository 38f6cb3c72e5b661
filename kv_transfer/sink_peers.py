"""Counters and path of every prompt engine that a sink has met, a bounded number of them."""

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

from kv_transfer.sink_contact import PathReport
from kv_transfer.stats import SinkCounters
from wire.services import PromptEngineAddress
from wire.transfer import PeerState, TransferPeer

MAX_REPORTED = 64
"""Each is several lines of metrics; those met longest ago are summed as `OTHER`."""

MAX_KEPT = 4096

OTHER = "other"


@dataclass(slots=True)
class Peer:
    control_address: str = ""
    path: PathReport | None = None
    counters: SinkCounters = field(default_factory=SinkCounters)


class SinkPeers:
    """Written by the pump thread only; an engine keeps its entry when it restarts."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self.nobody = SinkCounters()
        """What belongs to no engine, and what those forgotten had counted."""

    def at(self, address: PromptEngineAddress) -> Peer:
        """This engine's entry, as the one met last."""
        peer = self._peers.setdefault(address.engine_id, Peer())
        peer.control_address = address.control_address
        self._peers.move_to_end(address.engine_id)
        if len(self._peers) > MAX_KEPT:
            _, oldest = self._peers.popitem(last=False)
            self.nobody.add(oldest.counters)
        return peer

    def total(self) -> SinkCounters:
        total = SinkCounters()
        total.add(self.nobody)
        for peer in list(self._peers.values()):
            total.add(peer.counters)
        return total

    def report(self, states: dict[str, PeerState]) -> tuple[TransferPeer, ...]:
        """`states` of the engines there is a session with, or that are paused."""
        peers = list(self._peers.items())
        num_others = max(0, len(peers) - MAX_REPORTED)
        others = SinkCounters()
        others.add(self.nobody)
        for _, peer in islice(peers, num_others):
            others.add(peer.counters)
        found = [
            _report(engine_id, peer, states.get(engine_id, "gone")) for engine_id, peer in peers[num_others:]
        ]
        if others != SinkCounters():
            found.append(_report(OTHER, Peer(counters=others), "gone"))
        return tuple(found)


def _report(engine_id: str, peer: Peer, state: PeerState) -> TransferPeer:
    counters, path = peer.counters, peer.path or PathReport("", "", 0.0, 0.0)
    return TransferPeer(
        engine_id=engine_id,
        control_address=peer.control_address,
        state=state,
        path=path.path,
        version=path.version,
        latency_s=path.latency_s,
        rate_bytes_per_s=path.rate_bytes_per_s,
        bytes_read=counters.bytes_read,
        arrived=counters.arrived,
        fences=counters.fences,
        quarantined_blocks=counters.quarantined_blocks,
        failures_by_reason=dict(counters.failures),
        seconds_by_stage=dict(counters.stage_s),
        counts_by_stage=dict(counters.stage_counts),
    )
