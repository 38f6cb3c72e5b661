"""The prompt service.

`POST /v1/prompt`: prompt token ids in, the first output token of every choice out.
`DELETE /v1/handovers/{id}`: nobody will take what was computed; its blocks need not wait for their lease.
"""

import time

from fastapi import FastAPI, Request, Response

from engine.ipc import AddRequest, RequestOutput
from engine.serving.app import create_service_app
from engine.serving.errors import InvalidRequest, ServiceFailure
from engine.serving.limits import check_limits
from engine.serving.metrics import ServiceMetrics
from engine.serving.streaming import ClientLeft, unless_client_leaves
from engine.serving.supervisor import EngineSupervisor
from wire.json_body import to_json
from wire.services import PromptChoice, PromptRequest, PromptResponse

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
        metrics.count_request(outcome(answer))
        return Response(to_json(answer), media_type="application/json")

    @app.delete("/v1/handovers/{handover_id}", status_code=204)
    async def withdraw(handover_id: str) -> None:
        supervisor.withdraw_handover(handover_id)

    return app


def outcome(answer: PromptResponse) -> str:
    """What became of the prompt: handed over for at least one choice, or ended by the first tokens."""
    reasons = [choice.finish_reason for choice in answer.choices]
    return "handed_over" if None in reasons else str(reasons[0])


async def prefill(supervisor: EngineSupervisor, body: PromptRequest) -> PromptResponse:
    """Have the engine prefill the prompt and sample first tokens; leaving early aborts the request."""
    link = supervisor.link
    assert supervisor.engine is not None, "a link exists only while the engine is ready"
    check_limits(supervisor.engine, body.prompt_token_ids, body.sampling, body.num_replayed_tokens)
    command = AddRequest(
        request_id=body.request_id,
        handover_id=body.handover_id,
        previous_engine=body.previous_engine,
        prompt_token_ids=body.prompt_token_ids,
        sampling=body.sampling,
        num_completions=body.num_completions,
        num_replayed_tokens=body.num_replayed_tokens,
        cache_salt=body.cache_salt,
        priority=body.priority,
        routing_key=body.routing_key,
    )
    outputs: list[RequestOutput] = []
    with link.open_stream(command) as stream:
        while len(outputs) < body.num_completions:
            output = await stream.next()
            if not output.tokens:
                raise InvalidRequest(
                    f"the engine ended the request without a token: {output.finish_reason}",
                    param="prompt_token_ids",
                    code=output.finish_reason,
                )
            outputs.append(output)
        stream.has_ended = True  # the hand-over now belongs to its reader: do not abort it here
    return PromptResponse(
        request_id=body.request_id,
        choices=tuple(PromptChoice(token=o.tokens[0], finish_reason=o.finish_reason) for o in outputs),
        num_prompt_tokens=len(body.prompt_token_ids) - body.num_replayed_tokens,
        num_cached_tokens=outputs[0].num_cached_tokens,
        prompt_logprobs=outputs[0].prompt_logprobs,
    )
