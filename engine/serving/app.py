"""The FastAPI application both services start from: health, info, metrics, limits and error bodies."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Annotated

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.serving.errors import EngineUnavailable, InvalidRequest, ServiceFailure
from engine.serving.metrics import ServiceMetrics
from engine.serving.supervisor import EngineSupervisor
from wire.cache import CacheEvents
from wire.json_body import to_json
from wire.services import EngineInfo, EngineRole, ErrorBody, ServiceError
from wire.token_link import LINK_PATH

MAX_CACHE_EVENTS_WAIT_S = 30.0


def create_service_app(
    title: str, role: EngineRole, supervisor: EngineSupervisor, metrics: ServiceMetrics, max_body_bytes: int
) -> FastAPI:
    """An app with everything but the service's own endpoint."""
    app = FastAPI(title=title, version=version("tandem-serve"), docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, max_body_bytes=max_body_bytes)
    app.add_exception_handler(ServiceFailure, _on_service_failure)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)

    @app.get("/health/live")
    async def live() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/health/ready")
    async def ready() -> JSONResponse:
        body: dict[str, str | float] = {
            "status": supervisor.state,
            "stage": supervisor.progress.stage,
            "fraction": supervisor.progress.fraction,
        }
        if supervisor.state == "draining":
            body["grace_left_s"] = supervisor.grace_left_s
        return JSONResponse(body, status_code=200 if supervisor.state == "ready" else 503)

    @app.get("/info")
    async def info() -> Response:
        return Response(to_json(engine_info(role, supervisor)), media_type="application/json")

    @app.get("/v1/cache/events")
    async def cache_events(
        epoch: int | None = None,
        after: Annotated[int, Query(ge=0)] = 0,
        wait_s: Annotated[float, Query(ge=0, le=MAX_CACHE_EVENTS_WAIT_S)] = 0.0,
    ) -> Response:
        engine = engine_info(role, supervisor)
        log = supervisor.cache_log
        events = await log.read(epoch, after, wait_s)
        answer = CacheEvents(
            engine_id=engine.engine_id,
            epoch=log.epoch,
            block_size=engine.block_size,
            next_event=log.next_event,
            events=events,
        )
        return Response(to_json(answer), media_type="application/json")

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app


def engine_info(role: EngineRole, supervisor: EngineSupervisor) -> EngineInfo:
    """Who the engine is now; raises `EngineUnavailable` until it has loaded."""
    engine, config, stats = supervisor.engine, supervisor.config, supervisor.stats
    if engine is None or config is None or stats is None:
        raise EngineUnavailable(f"the engine is {supervisor.state} ({supervisor.progress.stage})")
    return EngineInfo(
        role=role,
        engine_id=config.engine_id,
        epoch=config.epoch,
        model=engine.model,
        compatibility_hash=engine.compatibility_hash,
        compatibility=engine.compatibility,
        control_address=engine.control_address,
        transport=engine.transport,
        kernels=engine.kernels,
        peers=stats.peers,
        max_model_len=engine.max_model_len,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        num_usable_blocks=stats.num_usable_blocks,
        num_free_blocks=stats.num_free_blocks,
        zone=supervisor.zone,
        has_token_link=role != "prompt",
        version=version("tandem-serve"),
    )


class BodyLimit:
    """ASGI middleware that answers 413 once a request body grows past the limit."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A link's body has no end; its frames have limits of their own.
        if scope["type"] != "http" or scope["path"] == LINK_PATH:
            await self._app(scope, receive, send)
            return
        num_bytes = 0

        async def limited_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_body_bytes:
                    raise _BodyTooLarge(
                        f"the body is larger than {self._max_body_bytes} bytes; see --max-body-bytes"
                    )
            return message

        await self._app(scope, limited_receive, send)


class _BodyTooLarge(InvalidRequest):
    status = 413


def error_response(status: int, body: ErrorBody, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(body), status_code=status, media_type="application/json", headers=headers)


async def _on_service_failure(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceFailure)
    return error_response(error.status, error.body)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
    message = str(first["msg"]).removeprefix("Value error, ")
    return error_response(400, InvalidRequest(f"{field}: {message}", param=field).body)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = ErrorBody(error=ServiceError(message=str(error.detail), type="invalid_request_error"))
    return error_response(error.status_code, body, error.headers)
