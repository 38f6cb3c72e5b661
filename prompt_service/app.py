"""`POST /v1/prompt`: prompt token ids in, the first output token out."""

import time

from fastapi import FastAPI, Request, Response

from engine.ipc import AddRequest
from engine.serving.app import create_service_app
from engine.serving.errors import InvalidRequest, ServiceFailure
from engine.serving.limits import check_limits
from engine.serving.metrics import ServiceMetrics
from engine.serving.streaming import ClientLeft, unless_client_leaves
from engine.serving.supervisor import EngineSupervisor
from wire.json_body import to_json
from wire.services import PromptRequest, PromptResponse

CLIENT_CLOSED_REQUEST = 499


def create_app(supervisor: EngineSupervisor, max_body_bytes: int) -> FastAPI:
    metrics = ServiceMetrics("prompt", supervisor)
    app = create_service_app("Tandem prompt service", "prompt", supervisor, metrics, max_body_bytes)

    @app.post("/v1/prompt")
    async def prompt(body: PromptRequest, request: Request) -> Response:
        started_s = time.monotonic()
        try:
            answer = await unless_client_leaves(request, prefill(supervisor, body))
        except ClientLeft:
            metrics.count_request("abort")
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except ServiceFailure:
            metrics.count_request("error")
            raise
        metrics.observe_first_token(time.monotonic() - started_s)
        metrics.count_request(answer.finish_reason or "handed_over")
        return Response(to_json(answer), media_type="application/json")

    return app


async def prefill(supervisor: EngineSupervisor, body: PromptRequest) -> PromptResponse:
    """Have the engine prefill the prompt and sample one token; leaving early aborts the request."""
    link = supervisor.link
    assert supervisor.engine is not None, "a link exists only while the engine is ready"
    check_limits(supervisor.engine, body.prompt_token_ids, body.sampling)
    command = AddRequest(
        request_id=body.request_id,
        handover_id=body.handover_id,
        prompt_token_ids=body.prompt_token_ids,
        sampling=body.sampling,
    )
    with link.open_stream(command) as stream:
        output = await stream.next()
        stream.has_ended = True  # the hand-over now belongs to its reader: do not abort it here
    if not output.tokens:
        raise InvalidRequest(
            f"the engine ended the request without a token: {output.finish_reason}",
            param="prompt_token_ids",
            code=output.finish_reason,
        )
    return PromptResponse(
        request_id=body.request_id,
        token=output.tokens[0],
        num_prompt_tokens=len(body.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens,
        finish_reason=output.finish_reason,
    )
