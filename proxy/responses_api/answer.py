"""The answer to a request to `/v1/responses`, whole or as a stream of typed events."""

from typing import Literal

from proxy.answers import AnswerShape, ChoiceOutput, PlainEvents
from proxy.client import Client
from proxy.errors import ProxyError
from proxy.generation_api import AnswerContext, GenerationApi
from proxy.message_delta import MessageDelta
from proxy.openai_responses import Usage
from proxy.openai_types import ChatRequest, TextRequest
from proxy.responses_api.body import (
    ResponsesAllowedChoice,
    ResponsesChat,
    ResponsesNamedChoice,
    ResponsesRequest,
    parse_responses,
)
from proxy.responses_api.items import Event, Json, OutputItems
from wire.json_body import to_json

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponseObject:
    """One response and how far it is."""

    def __init__(self, request: ResponsesRequest, request_id: str, created: int, with_logprobs: bool) -> None:
        self._request = request
        self._head = {"id": f"resp_{request_id}", "object": "response", "created_at": created}
        self.items = OutputItems(with_logprobs=with_logprobs)
        self.status: Status = "in_progress"

    def end(self, delta: MessageDelta) -> list[Event]:
        """Take over the last delta's finish reason."""
        self.status = "incomplete" if delta.finish_reason == "length" else "completed"
        return self.items.close(self.status)

    def as_json(self, usage: Usage | None = None, error: ProxyError | None = None) -> Json:
        request = self._request
        return {
            **self._head,
            "status": self.status,
            "error": None if error is None else _error_of(error),
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": request.model,
            "output": self.items.as_json(),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": _format_of(request)},
            "tool_choice": _choice_of(request),
            "tools": [tool.model_dump() for tool in request.tools or ()],
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage_json(usage),
            "user": request.user,
            "metadata": request.metadata or {},
        }


class StreamedResponse:
    """An event for everything that happens; numbered from 0."""

    def __init__(self, client: Client, response: ResponseObject) -> None:
        self._client = client
        self._response = response
        self._num_events = 0

    def choice_output(self, index: int) -> ChoiceOutput:
        return self

    def write_content(self, text: str) -> None:
        self.write(MessageDelta(content=text))

    def plain_events(self) -> None:
        """Every event has a number of its own."""

    def end_plain(self, text: str) -> None:
        assert not text

    def write(self, delta: MessageDelta) -> None:
        events = [] if self._num_events else self._opening()
        events += self._response.items.push(delta)
        if delta.finish_reason is not None:
            events += self._response.end(delta)
        if events:
            self._client.send_events(self._frames(events))

    async def finish(self, usage: Usage) -> None:
        kind = f"response.{self._response.status}"
        await self._client.end_events(self._frames([(kind, {"response": self._response.as_json(usage)})]))

    def broken(self, error: ProxyError) -> bytes:
        """The API's own event of a failure, and one with an `error` object, which makes SDKs raise."""
        self._response.status = "failed"
        failed = {"response": self._response.as_json(error=error)}
        body = {"code": error.error.code, "message": error.error.message, "param": error.error.param}
        return self._frames([("response.failed", failed), ("error", {**body, "error": error.error})])

    def _opening(self) -> list[Event]:
        response = self._response.as_json()
        return [
            ("response.created", {"response": response}),
            ("response.in_progress", {"response": response}),
        ]

    def _frames(self, events: list[Event]) -> bytes:
        return b"".join(self._frame(kind, fields) for kind, fields in events)

    def _frame(self, kind: str, fields: Json) -> bytes:
        data = to_json({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


class WholeResponse:
    def __init__(self, client: Client, response: ResponseObject) -> None:
        self._client = client
        self._response = response

    def choice_output(self, index: int) -> ChoiceOutput:
        return self

    def write_content(self, text: str) -> None:
        self.write(MessageDelta(content=text))

    def plain_events(self) -> PlainEvents:
        return PlainEvents()

    def end_plain(self, text: str) -> None:
        self.write_content(text)

    def write(self, delta: MessageDelta) -> None:
        self._response.items.push(delta)
        if delta.finish_reason is not None:
            self._response.end(delta)

    async def finish(self, usage: Usage) -> None:
        await self._client.send_json(200, to_json(self._response.as_json(usage)))

    def broken(self, error: ProxyError) -> bytes:
        raise AssertionError("a whole answer is sent at once or not at all")


def _answer(request: ChatRequest | TextRequest, context: AnswerContext) -> AnswerShape:
    assert isinstance(request, ResponsesChat)
    with_logprobs = request.num_logprobs is not None
    response = ResponseObject(request.source, context.request_id, context.created, with_logprobs)
    shape = StreamedResponse if request.stream else WholeResponse
    return shape(context.client, response)


RESPONSES = GenerationApi(path="/v1/responses", parse=parse_responses, answer=_answer)


def _error_of(error: ProxyError) -> Json:
    return {"code": "server_error", "message": error.error.message}


def _format_of(request: ResponsesRequest) -> Json:
    if request.text is None or request.text.format is None:
        return {"type": "text"}
    return request.text.format.model_dump(by_alias=True, exclude_none=True)


def _choice_of(request: ResponsesRequest) -> Json | str:
    if isinstance(request.tool_choice, ResponsesNamedChoice | ResponsesAllowedChoice):
        return request.tool_choice.model_dump()
    return request.tool_choice or "auto"


def _usage_json(usage: Usage) -> Json:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }
