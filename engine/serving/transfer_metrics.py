"""Metrics of hand-overs by peer: what a completion engine has read from each prompt engine, and how."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from wire.services import EngineRole
from wire.transfer import TransferPeer


@dataclass(frozen=True, slots=True)
class PeerMetric:
    name: str
    kind: Literal["gauge", "counter"]
    help: str
    value: Callable[[TransferPeer], float]


PEER_METRICS = (
    PeerMetric(
        "tandem_transfer_self_test_bytes_per_second",
        "gauge",
        "Rate measured at first contact",
        lambda peer: peer.rate_bytes_per_s,
    ),
    PeerMetric(
        "tandem_transfer_self_test_latency_seconds",
        "gauge",
        "One read of 64 KiB at first contact",
        lambda peer: peer.latency_s,
    ),
    PeerMetric(
        "tandem_transfer_bytes_total", "counter", "Bytes read into the pool", lambda peer: peer.bytes_read
    ),
    PeerMetric(
        "tandem_transfer_arrived_total", "counter", "Hand-overs read and confirmed", lambda peer: peer.arrived
    ),
    PeerMetric(
        "tandem_transfer_fences_total",
        "counter",
        "Connections cut to stop a read that did not end",
        lambda peer: peer.fences,
    ),
    PeerMetric(
        "tandem_transfer_quarantined_blocks_total",
        "counter",
        "Destination blocks of reads that did not end when given up",
        lambda peer: peer.quarantined_blocks,
    ),
)
LABELS = ("role", "peer")


def peer_metrics(role: EngineRole, peers: Iterable[TransferPeer]) -> Iterator[Metric]:
    peers = tuple(peers)
    yield _info(role, peers)
    for metric in PEER_METRICS:
        family = (GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily)(
            metric.name, metric.help, labels=LABELS
        )
        for peer in peers:
            family.add_metric((role, peer.engine_id), metric.value(peer))
        yield family
    yield _leases(role, peers)
    yield _failures(role, peers)
    yield _stages(role, peers)


def _info(role: EngineRole, peers: Iterable[TransferPeer]) -> Metric:
    family = GaugeMetricFamily(
        "tandem_transfer_peer",
        "Always 1: how a prompt engine is read",
        labels=(*LABELS, "state", "path", "version"),
    )
    for peer in peers:
        family.add_metric((role, peer.engine_id, peer.state, peer.path, peer.version), 1)
    return family


def _leases(role: EngineRole, peers: Iterable[TransferPeer]) -> Metric:
    family = CounterMetricFamily(
        "tandem_transfer_leases_total", "Leases of a reader, by what happened", labels=(*LABELS, "event")
    )
    for peer in peers:
        for event, count in peer.leases_by_event.items():
            family.add_metric((role, peer.engine_id, event), count)
    return family


def _failures(role: EngineRole, peers: Iterable[TransferPeer]) -> Metric:
    family = CounterMetricFamily(
        "tandem_transfer_failures_total", "Hand-overs that failed, by reason", labels=(*LABELS, "reason")
    )
    for peer in peers:
        for reason, count in peer.failures_by_reason.items():
            family.add_metric((role, peer.engine_id, reason), count)
    return family


def _stages(role: EngineRole, peers: Iterable[TransferPeer]) -> Metric:
    family = SummaryMetricFamily(
        "tandem_transfer_stage_seconds", "Time that hand-overs spent in each stage", labels=(*LABELS, "stage")
    )
    for peer in peers:
        for stage, seconds in peer.seconds_by_stage.items():
            count = peer.counts_by_stage.get(stage, 0)
            family.add_metric((role, peer.engine_id, stage), count_value=count, sum_value=seconds)
    return family
