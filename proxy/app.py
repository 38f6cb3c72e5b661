"""The proxy's ASGI application."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from fastapi import FastAPI, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from proxy.activity import Activity
from proxy.admission import Admission, AdmissionLimits
from proxy.api_keys import ApiKeyCheck
from proxy.cache_reader import CacheReader
from proxy.departures import Departures
from proxy.discovery.start import discovery
from proxy.draining import Draining
from proxy.endpoint import GenerationEndpoint
from proxy.engine_client import EngineClient
from proxy.engine_transport import EngineTransport
from proxy.engine_waits import EngineWaits
from proxy.engines import EngineDirectory
from proxy.errors import UnknownModel
from proxy.generation_apis import APIS
from proxy.json_endpoint import JsonEndpoint
from proxy.key_limits import KeyGate, KeyLimits, KeyUse, NoLimits
from proxy.legs import EngineCalls, LegTimeouts
from proxy.loads import EngineLoads
from proxy.metrics import ProxyMetrics
from proxy.migration import MigrationLimits
from proxy.openai_responses import model_list, model_object
from proxy.openapi import openapi_document
from proxy.operation_routes import add_operations, json_response
from proxy.page.routes import add_page
from proxy.pairing import PairingRules
from proxy.preparation import Preparation, TokenLimits
from proxy.proxy_app import ProxyApp
from proxy.proxy_services import ProxyServices
from proxy.request_ids import RequestIds
from proxy.responses_api.answer import RESPONSES
from proxy.routes import Routes
from proxy.settings import ProxySettings
from proxy.text_model import TextModel
from proxy.token_link import TokenLinks
from proxy.token_routes import TokenRoutes
from proxy.unknown_routes import on_http_exception, on_mistake
from proxy.workers.answers import answer_peer
from proxy.workers.peers import Peers
from proxy.workers.shared_key_use import SharedKeyUse
from settings.secret_keys import SecretKeys, secret_keys
from wire.json_body import to_json

KEEPALIVE_S = 4.0
"""Below the 5 s after which an idle uvicorn closes, so that no request meets a closing connection."""


def create_app(settings: ProxySettings, text: TextModel, http: EngineClient | None = None) -> ProxyApp:
    """The application; its lifespan owns the connections to engines and the tasks that watch them."""
    keys = secret_keys(settings.api_keys, settings.api_keys_file)
    service_token = secret_keys(settings.service_token, settings.service_token_file)
    http = http or engine_http_client(service_token)
    services = _services(settings, text, http, keys, service_token)
    engines = discovery(settings, services.directory.place, services.metrics.discovery_failed)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        caches = CacheReader(
            http, services.directory, services.routes.cache_changed, refresh_s=settings.refresh_s
        )
        owners = (engines, services.directory, caches, services.departures)
        watching = [asyncio.create_task(owner.run(), name=type(owner).__name__) for owner in owners]
        services.vital.extend(watching[:2])
        await services.peers.serve(partial(answer_peer, services))
        try:
            yield
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            await services.peers.close()
            await services.calls.close()
            await http.aclose()
            text.close()

    app = ProxyApp(keys, _version(), lifespan)
    app.state.services = services
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(Exception, on_mistake)
    app.add_middleware(ApiKeyCheck, keys=keys, settings=settings, metrics=services.metrics)
    if settings.cors_origins:  # before keys: a browser asks without one whether it may ask
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-tandem-route", "x-tandem-migrations", "retry-after"],
        )
    app.add_middleware(RequestIds)
    _add_generation(app, services)
    _add_tokens(app, services)
    _add_models(app, text.name)
    add_operations(app, services, app.version)
    add_page(app, services, app.version)
    app.openapi = lambda: openapi_document(app.version)  # type: ignore[method-assign]
    return app


def engine_http_client(service_token: SecretKeys) -> EngineClient:
    return EngineClient(EngineTransport(idle_s=KEEPALIVE_S), service_token)


def _services(
    settings: ProxySettings,
    text: TextModel,
    http: EngineClient,
    keys: SecretKeys,
    service_token: SecretKeys,
) -> ProxyServices:
    timeouts = LegTimeouts(
        settings.connect_timeout_s, settings.first_byte_timeout_s, settings.stall_timeout_s
    )
    metrics, activity = ProxyMetrics(), Activity()
    waits = EngineWaits()
    directory = EngineDirectory(
        http,
        model=text.name,
        refresh_s=settings.refresh_s,
        on_silent=waits.give_up,
        on_ejected=lambda engine: metrics.ejections.labels(engine.role).inc(),
    )
    rules = PairingRules(
        prompt=settings.prompt_policy,
        completion=settings.completion_policy,
        normal=settings.normal_policy,
        zone=settings.zone,
        normal_max_new_tokens=settings.normal_max_new_tokens,
    )
    loads = EngineLoads()
    links = (
        TokenLinks(
            waits,
            service_token,
            connect_timeout_s=settings.connect_timeout_s,
            on_leaving=directory.leaves,
            on_gaps=partial(_count_gaps, metrics, activity),
        )
        if settings.token_link
        else None
    )
    routes = Routes(directory, loads, rules)
    under_way = settings.max_prompt_tokens_under_way
    return ProxyServices(
        settings=settings,
        keys=keys,
        text=text,
        directory=directory,
        routes=routes,
        preparation=Preparation(
            text,
            (text.name, settings.model),
            routes,
            TokenLimits(
                max_prompt_tokens=settings.max_prompt_tokens,
                max_completion_tokens=settings.max_completion_tokens,
            ),
        ),
        calls=EngineCalls(http, timeouts, waits, loads, directory.answered, links),
        admission=Admission(
            AdmissionLimits(
                first_token_s=settings.first_token_limit_s,
                max_tokens_under_way=None if under_way is None else settings.share_of(under_way),
                max_waiting=settings.share_of(settings.max_waiting_requests),
            ),
            time.monotonic,
        ),
        key_use=_key_gate(settings),
        metrics=metrics,
        activity=activity,
        departures=Departures(routes),
        migration_limits=MigrationLimits(settings.max_migrations, settings.migration_wait_s),
        draining=Draining(),
        peers=Peers(settings.worker_directory, settings.worker_number),
    )


def _key_gate(settings: ProxySettings) -> KeyGate:
    """Of all workers together, where there are several and there is something to count."""
    limits = KeyLimits(
        requests_per_s=settings.key_requests_per_s,
        burst=settings.key_burst,
        max_open=settings.key_max_open,
    )
    if not limits.are_set:
        return NoLimits()
    if settings.worker_directory is None:
        return KeyUse(limits, time.monotonic)
    return SharedKeyUse(limits, time.monotonic, settings.worker_directory, settings.worker_number)


def _add_generation(app: ProxyApp, services: ProxyServices) -> None:
    for api in (*APIS, RESPONSES):
        endpoint = GenerationEndpoint(api, services)
        if not services.settings.cors_origins:  # whose headers middleware adds
            app.serve_directly(api.path, endpoint)
        app.router.routes.append(Route(api.path, endpoint=endpoint, methods=["POST"]))


def _add_tokens(app: FastAPI, services: ProxyServices) -> None:
    names = frozenset((services.text.name, services.settings.model))
    tokens = TokenRoutes(services.text, names, services.routes)
    for path, handle in (("/tokenize", tokens.tokenize), ("/detokenize", tokens.detokenize)):
        endpoint = JsonEndpoint(handle, services.settings)
        app.router.routes.append(Route(path, endpoint=endpoint, methods=["POST"]))


def _add_models(app: FastAPI, model: str) -> None:
    created = int(time.time())

    @app.get("/v1/models")
    async def list_models() -> Response:
        return json_response(model_list(model, created))

    @app.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> Response:
        if model_id == model:
            return json_response(to_json(model_object(model, created)))
        error = UnknownModel(f"the model {model_id!r} does not exist", param="model")
        return json_response(to_json(error.body), error.status)


def _count_gaps(metrics: ProxyMetrics, activity: Activity, gaps_s: Sequence[float], now_s: float) -> None:
    """As `ChoiceClock` does for each token."""
    metrics.inter_token.observe_all(gaps_s)
    activity.next_tokens(gaps_s, now_s)


def _version() -> str:
    try:
        return version("tandem-serve")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0"
