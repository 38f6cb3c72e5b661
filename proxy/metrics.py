"""Every metric of the proxy, in a registry of its own; `docs/metrics.md` lists them for users."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from proxy.discovery.errors import ClusterRefused
from proxy.errors import EngineFailure
from proxy.fast_counts import CountFamily, HistogramFamily
from proxy.fast_histogram import FastHistogram
from wire.services import EngineRole

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class ProxyMetrics:
    """One set of metrics; several can live in one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = CountFamily(
            "counter",
            "tandem_proxy_requests",
            "Requests by endpoint and HTTP status; a stream broken in the middle counts as its error",
            ("endpoint", "status"),
            registry=registry,
        )
        self.routes = CountFamily(
            "counter",
            "tandem_proxy_routes",
            "Prompts sent to engines, by route: pair, normal for one that serves alone, leg for one of two",
            ("kind",),
            registry=registry,
        )
        self.cancellations = Counter(
            "tandem_proxy_cancellations",
            "Requests whose client left before the answer was complete, by what it was waiting for",
            ("stage",),
            registry=registry,
        )
        self.time_to_first_token = HistogramFamily(
            "tandem_proxy_time_to_first_token_seconds",
            "From the request's last byte to its first token",
            "endpoint",
            TTFT_BUCKETS_S,
            registry,
        )
        self.inter_token = FastHistogram(
            "tandem_proxy_inter_token_seconds",
            "Between arrivals of tokens of one choice; tokens that arrive together count once",
            ITL_BUCKETS_S,
        )
        registry.register(self.inter_token)
        self.tokens = CountFamily(
            "counter",
            "tandem_proxy_tokens",
            "Tokens of answered requests: prompt, cached (a part of prompt), completion",
            ("kind",),
            registry=registry,
        )
        self._tokens = tuple(self.tokens.labels(kind) for kind in ("prompt", "cached", "completion"))
        self.open_requests = CountFamily(
            "gauge",
            "tandem_proxy_open_requests",
            "Generation requests being served now, by whether they stream",
            ("stream",),
            registry=registry,
        )
        self.leg_failures = Counter(
            "tandem_proxy_leg_failures",
            "Calls to engines that failed, by the engine's role and the reason",
            ("role", "reason"),
            registry=registry,
        )
        self.migrations = Counter(
            "tandem_proxy_migrations",
            "Prompts and streams that went on elsewhere, by what had failed, or draining, and the stage: "
            "handover (another completion engine took the same), retry or stream",
            ("reason", "stage"),
            registry=registry,
        )
        self.ejections = Counter(
            "tandem_proxy_ejections",
            "Engines that failed too many requests in a row and got none for a while, by role",
            ("role",),
            registry=registry,
        )
        self.discovery_failures = Counter(
            "tandem_proxy_discovery_failures",
            "Times that a role's engines could not be looked up in the cluster, by why; those known stay",
            ("role", "reason"),
            registry=registry,
        )
        self.refused_keys = Counter(
            "tandem_proxy_refused_keys",
            "Requests without an API key, or with one that is not known",
            registry=registry,
        )
        self.refusals = Counter(
            "tandem_proxy_refusals",
            "Requests answered 429 by the proxy itself: queue_full, first_token_late, key_rate, key_open",
            ("reason",),
            registry=registry,
        )
        self.waiting_requests = Gauge(
            "tandem_proxy_waiting_requests", "Requests that wait for their turn", registry=registry
        )
        self.workers = Gauge(
            "tandem_proxy_workers",
            "Processes of this proxy whose counts are in this answer",
            registry=registry,
        )
        self.workers.set(1)
        self.ready_engines = Gauge(
            "tandem_proxy_ready_engines", "Engines that can be used now", ("role",), registry=registry
        )

    def discovery_failed(self, role: EngineRole, error: ClusterRefused) -> None:
        self.discovery_failures.labels(role, error.reason).inc()

    def count_failure(self, failure: EngineFailure) -> None:
        self.leg_failures.labels(failure.role, failure.reason).inc()

    def count_tokens(self, num_prompt: int, num_cached: int, num_completion: int) -> None:
        prompt, cached, completion = self._tokens
        prompt.value += num_prompt
        cached.value += num_cached
        completion.value += num_completion
