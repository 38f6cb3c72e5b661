"""`GET /`, its files, and two small JSON answers: the state of the stack, and how one request went."""

from collections import Counter
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Response

from proxy.activity import Activity, Bucket, Trace, quantile
from proxy.fleet import Engine
from proxy.operation_routes import json_response
from proxy.proxy_services import ProxyServices
from wire.json_body import to_json

Json = dict[str, Any]

_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
FILES: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/page/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
}


def add_page(app: FastAPI, services: ProxyServices, version: str) -> None:
    for path, (name, media_type) in FILES.items():
        _add_file(app, path, name, media_type)

    @app.get("/page/status")
    async def status() -> Response:
        return json_response(to_json(status_json(services, version)))

    @app.get("/page/requests/{request_id}")
    async def request(request_id: str) -> Response:
        trace = services.activity.find(request_id)
        if trace is None:
            elsewhere = await services.peers.ask(f"trace {request_id}")
            return json_response(elsewhere[0] if elsewhere else to_json({"state": "unknown"}))
        return json_response(to_json(trace_json(trace, engine_names(services))))


def _add_file(app: FastAPI, path: str, name: str, media_type: str) -> None:
    content = files(__package__).joinpath(name).read_bytes()

    @app.get(path)
    async def serve() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)


def status_json(services: ProxyServices, version: str) -> Json:
    names = engine_names(services)
    traces = services.activity.open_traces()
    moving = Counter(
        tuple(names.get(url, url) for url in trace.engine_urls)
        for trace in traces
        if trace.state == "hand-over"
    )
    serving = Counter(url for trace in traces for url in _busy_urls(trace))
    queued = services.routes.num_queued_tokens
    return {
        "model": services.text.name,
        "version": version,
        "is_draining": services.draining.has_begun,
        "num_open_requests": services.draining.num_open_requests,
        "engines": [
            {
                **engine_json(engine, names[engine.url]),
                "num_prompts": serving[engine.url],
                "num_queued_tokens": queued.get(engine.url, 0),
            }
            for engine in services.directory.snapshot().engines
        ],
        "handovers": [{"from": pair[0], "to": pair[1], "count": count} for pair, count in moving.items()],
        "bucket_s": services.activity.bucket_s,
        "history": history_json(services.activity),
    }


def _busy_urls(trace: Trace) -> tuple[str, ...]:
    """The engine that works on the prompt now; both while its blocks move."""
    if not trace.is_pair or trace.state == "hand-over":
        return trace.engine_urls
    return trace.engine_urls[:1] if trace.state == "prompt" else trace.engine_urls[1:]


def engine_json(engine: Engine, name: str) -> Json:
    info = engine.info
    return {
        "name": name,
        "role": engine.role,
        "is_ready": engine.is_routable,
        "problem": "" if engine.is_routable else engine.problem,
        "num_blocks": None if info is None else info.num_usable_blocks,
        "num_free_blocks": None if info is None else info.num_free_blocks,
        "transport": None if info is None else info.transport,
    }


def history_json(activity: Activity) -> list[Json]:
    return [_bucket_json(bucket, activity.bucket_s) for bucket in activity.buckets()]


def _bucket_json(bucket: Bucket, bucket_s: float) -> Json:
    return {
        "ttft_p50_s": quantile(bucket.first_token_s, 0.5),
        "ttft_p95_s": quantile(bucket.first_token_s, 0.95),
        "itl_p50_s": quantile(bucket.inter_token_s, 0.5),
        "itl_p95_s": quantile(bucket.inter_token_s, 0.95),
        "tokens_per_s": bucket.num_tokens / bucket_s,
        "num_requests": len(bucket.first_token_s),
    }


def trace_json(trace: Trace, names: Mapping[str, str]) -> Json:
    return {
        "state": trace.state,
        "engines": [names.get(url, url) for url in trace.engine_urls],
        "first_token_s": _since(trace, trace.first_token_s),
        "kv_arrived_s": _since(trace, trace.arrived_s),
        "ended_s": _since(trace, trace.ended_s),
        "num_migrations": trace.num_migrations,
    }


def _since(trace: Trace, time_s: float | None) -> float | None:
    return None if time_s is None else round(time_s - trace.started_s, 6)


def engine_names(services: ProxyServices) -> dict[str, str]:
    """Short names by URL: the role's letter and a number, as the page shows engines."""
    counts: Counter[str] = Counter()
    names = {}
    for engine in services.directory.snapshot().engines:
        counts[engine.role] += 1
        names[engine.url] = f"{engine.role} {counts[engine.role]}"
    return names
