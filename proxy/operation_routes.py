"""Routes for operators: health, metrics, the version."""

from collections.abc import Sequence

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from proxy.pairing import route_at
from proxy.proxy_services import ProxyServices
from proxy.workers.merged_metrics import MergedMetrics, encode_samples
from wire.json_body import to_json
from wire.services import EngineRole

ROLES: tuple[EngineRole, ...] = ("prompt", "completion", "normal")


def add_operations(app: FastAPI, services: ProxyServices, version: str) -> None:
    @app.get("/health/live")
    async def live() -> Response:
        ended = [task.get_name() for task in services.vital if task.done()]
        status = f"{' and '.join(ended)} ended, which no proxy can do without" if ended else "alive"
        return json_response(to_json({"status": status}), 503 if ended else 200)

    @app.get("/health")
    @app.get("/health/ready")
    async def ready() -> Response:
        fleet = services.directory.snapshot()
        is_ready = not services.draining.has_begun and route_at(fleet, 0) is not None
        status = "draining" if services.draining.has_begun else "ready" if is_ready else "not ready"
        engines = [
            {"role": engine.role, "url": engine.url, "ready": engine.is_routable, "problem": engine.problem}
            for engine in fleet.engines
        ]
        return json_response(to_json({"status": status, "engines": engines}), 200 if is_ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        told = await services.peers.ask("metrics")
        registry = metrics_now(services) if not told else merged_registry(services, told)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def tell_version() -> dict[str, str]:
        return {"version": version}


def metrics_now(services: ProxyServices) -> CollectorRegistry:
    """This process's, with what is only looked at when somebody asks."""
    fleet = services.directory.snapshot()
    for role in ROLES:
        services.metrics.ready_engines.labels(role).set(len(fleet.routable(role)))
    services.metrics.waiting_requests.set(services.admission.num_waiting)
    return services.metrics.registry


def merged_registry(services: ProxyServices, told: Sequence[bytes]) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(MergedMetrics([encode_samples(metrics_now(services)), *told]))
    return registry


def json_response(content: bytes, status: int = 200) -> Response:
    return Response(content, status_code=status, media_type="application/json")
