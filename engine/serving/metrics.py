"""Every metric of the prompt and the completion service; `docs/metrics.md` lists them for users."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.ipc import EngineStats
from engine.serving.signals import ScalingSignals
from engine.serving.supervisor import EngineSupervisor
from engine.serving.transfer_metrics import peer_metrics
from wire.services import EngineRole

LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True)
class EngineMetric:
    """A metric read from the engine's last statistics at the moment of a scrape."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    value: Callable[[EngineStats], float]


ENGINE_METRICS = (
    EngineMetric(
        "tandem_engine_waiting_sequences", "gauge", "Sequences waiting for a step", lambda s: s.num_waiting
    ),
    EngineMetric(
        "tandem_engine_running_sequences", "gauge", "Sequences taking part in steps", lambda s: s.num_running
    ),
    EngineMetric("tandem_engine_handovers", "gauge", "Hand-overs held or awaited", lambda s: s.num_handovers),
    EngineMetric(
        "tandem_engine_kv_free_blocks",
        "gauge",
        "KV blocks no request uses, cached ones included",
        lambda s: s.num_free_blocks,
    ),
    EngineMetric("tandem_engine_kv_blocks", "gauge", "KV blocks of the pool", lambda s: s.num_usable_blocks),
    EngineMetric("tandem_engine_state_free_slots", "gauge", "Free state slots", lambda s: s.num_free_slots),
    EngineMetric(
        "tandem_engine_state_slots",
        "gauge",
        "State slots of the pool; 0 for a model without states",
        lambda s: s.num_usable_slots,
    ),
    EngineMetric("tandem_engine_steps_total", "counter", "Steps run", lambda s: s.num_steps),
    EngineMetric(
        "tandem_engine_prompt_tokens_total",
        "counter",
        "Prompt tokens computed",
        lambda s: s.num_prompt_tokens,
    ),
    EngineMetric(
        "tandem_engine_output_tokens_total", "counter", "Tokens generated", lambda s: s.num_output_tokens
    ),
    EngineMetric(
        "tandem_engine_decoded_sequences_total",
        "counter",
        "Sequences in decode steps, summed over the steps",
        lambda s: s.num_decoded_sequences,
    ),
    EngineMetric(
        "tandem_engine_drafted_tokens_total", "counter", "Drafts verified", lambda s: s.num_drafted_tokens
    ),
    EngineMetric(
        "tandem_engine_accepted_tokens_total",
        "counter",
        "Drafts that came true",
        lambda s: s.num_accepted_tokens,
    ),
    EngineMetric(
        "tandem_engine_preempted_total",
        "counter",
        "Sequences ended for want of room",
        lambda s: s.num_preempted,
    ),
    EngineMetric(
        "tandem_engine_cache_query_tokens_total",
        "counter",
        "Tokens of admitted requests looked up in the prefix cache",
        lambda s: s.num_cache_query_tokens,
    ),
    EngineMetric(
        "tandem_engine_cache_hit_tokens_total",
        "counter",
        "Tokens of admitted requests found in the prefix cache",
        lambda s: s.num_cache_hit_tokens,
    ),
    EngineMetric(
        "tandem_engine_cache_blocks",
        "gauge",
        "KV blocks the prefix cache owns, in use or not",
        lambda s: s.num_cached_blocks,
    ),
    EngineMetric(
        "tandem_engine_cache_evicted_blocks_total",
        "counter",
        "KV blocks the prefix cache gave up for others",
        lambda s: s.num_evicted_blocks,
    ),
    EngineMetric("tandem_engine_busy_seconds_total", "counter", "Time spent in steps", lambda s: s.busy_s),
    EngineMetric(
        "tandem_engine_placeholder_steps_total",
        "counter",
        "Empty steps run for other ranks of the group",
        lambda s: s.num_placeholder_steps,
    ),
    EngineMetric(
        "tandem_engine_group_wait_seconds_total",
        "counter",
        "Time spent waiting for other ranks of the group",
        lambda s: s.group_wait_s,
    ),
)
TRANSFER_METRIC = "tandem_transfer"


class ServiceMetrics:
    """The metrics of one service in a registry of its own, so that several can live in one process."""

    def __init__(self, role: EngineRole, supervisor: EngineSupervisor) -> None:
        self.registry = CollectorRegistry()
        self._role = role
        self._requests = Counter(
            "tandem_service_requests_total",
            "Requests by outcome",
            ["role", "outcome"],
            registry=self.registry,
        )
        self._first_token_s = Histogram(
            "tandem_service_first_token_seconds",
            "Request to first token",
            ["role"],
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self.registry.register(_EngineCollector(role, supervisor))

    def count_request(self, outcome: str) -> None:
        self._requests.labels(self._role, outcome).inc()

    def observe_first_token(self, seconds: float) -> None:
        self._first_token_s.labels(self._role).observe(seconds)


class _EngineCollector(Collector):
    def __init__(self, role: EngineRole, supervisor: EngineSupervisor) -> None:
        self._role = role
        self._supervisor = supervisor

    def collect(self) -> Iterable[Metric]:
        supervisor = self._supervisor
        yield self._gauge(
            "tandem_service_ready", "1 while requests are accepted", supervisor.state == "ready"
        )
        yield self._gauge(
            "tandem_service_open_requests", "Requests being served", supervisor.num_open_requests
        )
        yield self._counter(
            "tandem_service_engine_restarts_total", "Engine processes lost", supervisor.num_restarts
        )
        yield from self._signals(supervisor.signals)
        if supervisor.stats is not None:
            yield from self._engine(supervisor.stats)
            yield from self._uses(supervisor)

    def _signals(self, signals: ScalingSignals) -> Iterator[Metric]:
        yield self._gauge(
            "tandem_engine_queued_prompt_tokens",
            "Prompt tokens of requests without a token yet",
            signals.num_queued_tokens,
        )
        yield self._gauge(
            "tandem_engine_predicted_first_token_seconds",
            "How long the queued prompt tokens take at the rate seen lately",
            signals.predicted_first_token_s,
        )
        yield self._gauge(
            "tandem_engine_inter_token_p90_seconds",
            "Time within which nine of ten tokens came lately; 0 while none do",
            signals.inter_token_p90_s,
        )

    def _uses(self, supervisor: EngineSupervisor) -> Iterator[Metric]:
        stats, config = supervisor.stats, supervisor.config
        assert stats is not None
        used = 1 - stats.num_free_blocks / stats.num_usable_blocks if stats.num_usable_blocks else 0.0
        yield self._gauge("tandem_engine_kv_use", "Part of the KV blocks that requests use", used)
        if config is not None:
            yield self._gauge(
                "tandem_engine_sequence_use",
                "Running and waiting sequences over the most that run at once",
                (stats.num_running + stats.num_waiting) / config.max_num_seqs,
            )

    def _engine(self, stats: EngineStats) -> Iterator[Metric]:
        for metric in ENGINE_METRICS:
            family = self._gauge if metric.kind == "gauge" else self._counter
            yield family(metric.name, metric.help, metric.value(stats))
        transfer = GaugeMetricFamily(
            TRANSFER_METRIC, "Hand-over protocol and transport", labels=["role", "counter"]
        )
        for counter, value in stats.transfer.items():
            transfer.add_metric([self._role, counter], value)
        yield transfer
        yield from peer_metrics(self._role, stats.peers)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["role"])
        family.add_metric([self._role], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["role"])
        family.add_metric([self._role], value)
        return family
