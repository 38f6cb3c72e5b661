"""The proxy's ASGI application."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version

import httpx
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.routing import Route

from proxy.draining import Draining
from proxy.endpoint import GenerationEndpoint, ProxyServices
from proxy.engine_transport import EngineTransport
from proxy.engines import EngineDirectory
from proxy.errors import BadRequest, UnknownModel
from proxy.generation_apis import APIS
from proxy.legs import EngineCalls, LegTimeouts
from proxy.metrics import ProxyMetrics
from proxy.openai_responses import model_list, model_object
from proxy.pairing import RoundRobin, route_at
from proxy.preparation import Preparation
from proxy.responses_api.answer import RESPONSES
from proxy.routes import Routes
from proxy.settings import ProxySettings
from proxy.text_model import TextModel
from wire.json_body import to_json
from wire.services import EngineRole, ErrorBody, ServiceError

ROLES: tuple[EngineRole, ...] = ("prompt", "completion", "normal")
KEEPALIVE_S = 4.0
"""Below the 5 s after which an idle uvicorn closes, so that no request meets a closing connection."""


def create_app(settings: ProxySettings, text: TextModel, http: httpx.AsyncClient | None = None) -> FastAPI:
    """The application; its lifespan owns the connections to engines and the tasks that watch them."""
    http = http or engine_http_client()
    services = _services(settings, text, http)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(services.directory.run())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await services.calls.close()
            await http.aclose()
            text.close()

    app = FastAPI(title="Tandem", version=_version(), docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.services = services
    app.add_exception_handler(HTTPException, _on_http_exception)
    _add_generation(app, services)
    _add_models(app, text.name)
    _add_operations(app, services)
    return app


def engine_http_client() -> httpx.AsyncClient:
    # Proxies named in the environment are for the outside world, never for engines.
    transport = EngineTransport(idle_s=KEEPALIVE_S)
    return httpx.AsyncClient(transport=transport, trust_env=False, follow_redirects=False)


def _services(settings: ProxySettings, text: TextModel, http: httpx.AsyncClient) -> ProxyServices:
    timeouts = LegTimeouts(
        settings.connect_timeout_s, settings.first_byte_timeout_s, settings.stall_timeout_s
    )
    calls = EngineCalls(http, timeouts)
    directory = EngineDirectory(
        http,
        {
            "prompt": settings.prompt_url,
            "completion": settings.completion_url,
            "normal": settings.normal_url,
        },
        model=text.name,
        refresh_s=settings.refresh_s,
        on_silent=calls.waits.give_up,
    )
    routes = Routes(directory, RoundRobin())
    return ProxyServices(
        settings=settings,
        text=text,
        directory=directory,
        routes=routes,
        preparation=Preparation(text, (text.name, settings.model), routes),
        calls=calls,
        metrics=ProxyMetrics(),
        draining=Draining(),
    )


def _add_generation(app: FastAPI, services: ProxyServices) -> None:
    for api in (*APIS, RESPONSES):
        endpoint = GenerationEndpoint(api, services)
        app.router.routes.append(Route(api.path, endpoint=endpoint, methods=["POST"]))


def _add_models(app: FastAPI, model: str) -> None:
    created = int(time.time())

    @app.get("/v1/models")
    async def list_models() -> Response:
        return _json(model_list(model, created))

    @app.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> Response:
        if model_id == model:
            return _json(to_json(model_object(model, created)))
        error = UnknownModel(f"the model {model_id!r} does not exist", param="model")
        return _json(to_json(error.body), error.status)


def _add_operations(app: FastAPI, services: ProxyServices) -> None:
    @app.get("/health/live")
    async def live() -> dict[str, str]:
        return {"status": "alive"}

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
        return _json(to_json({"status": status, "engines": engines}), 200 if is_ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        fleet = services.directory.snapshot()
        for role in ROLES:
            services.metrics.ready_engines.labels(role).set(len(fleet.routable(role)))
        return Response(generate_latest(services.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _json(content: bytes, status: int = 200) -> Response:
    return Response(content, status_code=status, media_type="application/json")


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    body = ErrorBody(error=ServiceError(message=message, type=BadRequest.error_type))
    return Response(
        to_json(body), status_code=error.status_code, media_type="application/json", headers=error.headers
    )


def _version() -> str:
    try:
        return version("tandem-serve")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0"
