"""`POST /v1/completion`: token ids in, a stream of token ids out. `POST /v1/link`: many of them at once.

The status line comes at once and says whether this engine takes the request; a failure after that, such as a
hand-over that does not come, is an event with the status it would have had.
"""

import time
from collections.abc import AsyncIterator

from fastapi import FastAPI, Response
from starlette.routing import Route

from completion_service.token_link import TokenLinkEndpoint
from engine.ipc import AddRequest, RequestOutput
from engine.serving.app import create_service_app
from engine.serving.engine_link import EngineLink
from engine.serving.errors import InvalidRequest, ServiceFailure
from engine.serving.limits import check_limits
from engine.serving.metrics import ServiceMetrics
from engine.serving.streaming import EventStream
from engine.serving.supervisor import EngineSupervisor
from wire.json_body import to_json
from wire.services import CompletionEvent, CompletionRequest, EngineRole
from wire.token_link import LINK_PATH


def create_app(role: EngineRole, supervisor: EngineSupervisor, max_body_bytes: int) -> FastAPI:
    """`role` is `completion` or `normal`."""
    metrics = ServiceMetrics(role, supervisor)
    app = create_service_app("Tandem completion service", role, supervisor, metrics, max_body_bytes)

    @app.post("/v1/completion")
    async def completion(body: CompletionRequest) -> Response:
        link = checked_link(role, supervisor, body)
        return EventStream(events(role, link, engine_request(body), metrics))

    def check(body: CompletionRequest) -> tuple[EngineLink, AddRequest]:
        return checked_link(role, supervisor, body), engine_request(body)

    endpoint = TokenLinkEndpoint(check, metrics, supervisor, with_cached_tokens=role == "normal")
    app.router.routes.append(Route(LINK_PATH, endpoint=endpoint, methods=["POST"]))
    return app


def checked_link(role: EngineRole, supervisor: EngineSupervisor, body: CompletionRequest) -> EngineLink:
    """The link to the engine, which can serve the request; `ServiceFailure` where it cannot."""
    check_role(role, body)
    link = supervisor.link
    assert supervisor.engine is not None, "a link exists only while the engine is ready"
    check_limits(supervisor.engine, body.prompt_token_ids, body.sampling, body.num_replayed_tokens)
    return link


def check_role(role: EngineRole, body: CompletionRequest) -> None:
    """Raise `InvalidRequest` when the request is meant for the other kind of engine."""
    is_handover = body.prompt_engine is not None and body.handover_id is not None
    if role == "completion" and not is_handover:
        raise InvalidRequest(
            "a completion engine needs prompt_engine and handover_id; it cannot prefill",
            param="prompt_engine",
        )
    if role == "normal" and (body.prompt_engine is not None or body.handover_id is not None):
        raise InvalidRequest(
            "a normal engine prefills by itself and takes no prompt_engine and no handover_id",
            param="prompt_engine",
        )


def engine_request(body: CompletionRequest) -> AddRequest:
    return AddRequest(
        request_id=body.request_id,
        prompt_token_ids=body.prompt_token_ids,
        sampling=body.sampling,
        num_completions=body.num_completions,
        num_replayed_tokens=body.num_replayed_tokens,
        cache_salt=body.cache_salt,
        priority=body.priority,
        routing_key=body.routing_key,
        handover_id=body.handover_id,
        prompt_engine=body.prompt_engine,
    )


async def events(
    role: EngineRole, link: EngineLink, request: AddRequest, metrics: ServiceMetrics
) -> AsyncIterator[bytes]:
    """The request's outputs as server-sent events; closing the iterator aborts the request."""
    started_s = time.monotonic()
    outcome = "abort"
    is_first = True
    try:
        with link.open_stream(request) as stream:
            async for output in stream:
                if is_first:
                    metrics.observe_first_token(time.monotonic() - started_s)
                    is_first = False
                yield frame(event_of(role, output))
                if output.is_last:
                    outcome = output.finish_reason or outcome
    except ServiceFailure as failure:
        outcome = "error"
        yield frame(CompletionEvent(error=failure.error, error_status=failure.status))
    finally:
        metrics.count_request(outcome)


def event_of(role: EngineRole, output: RequestOutput) -> CompletionEvent:
    return CompletionEvent(
        choice=output.choice,
        tokens=output.tokens,
        finish_reason=output.finish_reason,
        num_cached_tokens=output.num_cached_tokens if role == "normal" else None,
        prompt_logprobs=output.prompt_logprobs,
    )


def frame(event: CompletionEvent) -> bytes:
    return b"data: " + to_json(event) + b"\n\n"
