"""The published OpenAPI document, made of the types that bodies are validated with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from proxy import answer_types
from proxy.openai_types import ChatRequest, TextRequest
from proxy.responses_api.body import ResponsesRequest
from proxy.token_routes import DetokenizeRequest, TokenizeRequest

Json = dict[str, Any]
Mode = Literal["validation", "serialization"]
REF = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One route: `answer` is a type of JSON or a media type; `chunk` is for streams."""

    method: str
    path: str
    summary: str
    answer: type[BaseModel] | str
    body: type[BaseModel] | None = None
    chunk: type[BaseModel] | None = None
    may_be_unavailable: type[BaseModel] | None = None
    parameters: tuple[str, ...] = ()

    @property
    def operation_id(self) -> str:
        words = self.path.strip("/").replace("{", "").replace("}", "").replace("/", "_")
        return f"{self.method}_{words or 'page'}"


PAGE_FILES = ("/page/page.css", "/page/page.js", "/page/charts.js", "/page/chat.js")
"""Parts of the web page, which are not described."""

OPERATIONS = (
    Operation(
        method="post", path="/v1/chat/completions", summary="Answer a chat", body=ChatRequest,
        answer=answer_types.ChatCompletion, chunk=answer_types.ChatCompletionChunk,
    ),
    Operation(
        method="post", path="/v1/completions", summary="Go on with a text or with token ids",
        body=TextRequest, answer=answer_types.TextCompletion, chunk=answer_types.TextCompletion,
    ),
    Operation(
        method="post", path="/v1/responses", summary="Answer a chat, as typed items", body=ResponsesRequest,
        answer=answer_types.ResponseAnswer, chunk=answer_types.ResponseEvent,
    ),
    Operation(method="get", path="/v1/models", summary="List the model", answer=answer_types.ModelList),
    Operation(
        method="get", path="/v1/models/{model_id}", summary="One model", answer=answer_types.Model,
        parameters=("model_id",),
    ),
    Operation(
        method="post", path="/tokenize", summary="Token ids of a text or a chat", body=TokenizeRequest,
        answer=answer_types.Tokens,
    ),
    Operation(
        method="post", path="/detokenize", summary="The text of token ids", body=DetokenizeRequest,
        answer=answer_types.Text,
    ),
    Operation(method="get", path="/version", summary="Version of this server", answer=answer_types.Version),
    Operation(
        method="get", path="/health", summary="Can requests be served?", answer=answer_types.Health,
        may_be_unavailable=answer_types.Health,
    ),
    Operation(
        method="get", path="/health/ready", summary="Can requests be served?", answer=answer_types.Health,
        may_be_unavailable=answer_types.Health,
    ),
    Operation(
        method="get", path="/health/live", summary="Does the process answer?", answer=answer_types.Alive
    ),
    Operation(method="get", path="/metrics", summary="Prometheus metrics", answer="text/plain"),
    Operation(method="get", path="/", summary="The web page", answer="text/html"),
    Operation(
        method="get", path="/page/status", summary="What the web page shows", answer=answer_types.PageStatus
    ),
    Operation(
        method="get", path="/page/requests/{request_id}", summary="How a request went",
        parameters=("request_id",),
        answer=answer_types.PageRequest,
    ),
)  # fmt: skip


def openapi_document(version: str) -> Json:
    """OpenAPI 3.1; every operation's other statuses are errors of one shape."""
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": version},
        "paths": paths,
        "components": {"schemas": _schemas()},
    }


def _operation(operation: Operation) -> Json:
    described: Json = {
        "operationId": operation.operation_id,
        "summary": operation.summary,
        "responses": {"200": _success(operation), "default": _json_of("Error", answer_types.Error)},
    }
    if operation.may_be_unavailable is not None:
        described["responses"]["503"] = _json_of("Not ready", operation.may_be_unavailable)
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _content(operation.body)}
    if operation.parameters:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in operation.parameters
        ]
    return described


def _success(operation: Operation) -> Json:
    if isinstance(operation.answer, str):
        return {"description": "Text", "content": {operation.answer: {"schema": {"type": "string"}}}}
    success = _json_of("Answer", operation.answer)
    if operation.chunk is not None:
        described = f"Server-sent events, each with a {operation.chunk.__name__} as its data"
        success["content"]["text/event-stream"] = {"schema": {"type": "string", "description": described}}
    return success


def _json_of(description: str, model: type[BaseModel]) -> Json:
    return {"description": description, "content": _content(model)}


def _content(model: type[BaseModel]) -> Json:
    return {"application/json": {"schema": {"$ref": REF.format(model=model.__name__)}}}


def _schemas() -> Mapping[str, Any]:
    inputs = [operation.body for operation in OPERATIONS if operation.body is not None]
    outputs: list[type[BaseModel]] = [answer_types.Error]
    for operation in OPERATIONS:
        models = (operation.answer, operation.chunk)
        outputs += [model for model in models if isinstance(model, type) and model not in outputs]
    of_inputs: list[tuple[type[BaseModel], Mode]] = [(model, "validation") for model in inputs]
    of_outputs: list[tuple[type[BaseModel], Mode]] = [(model, "serialization") for model in outputs]
    _, document = models_json_schema([*of_inputs, *of_outputs], ref_template=REF)
    schemas: Mapping[str, Any] = document["$defs"]
    return schemas
