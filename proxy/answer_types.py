"""What answers look like, for the OpenAPI document; answers themselves are built as plain JSON."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_serialization_defaults_required=False)


class ErrorObject(_Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(_Answer):
    error: ErrorObject


class CachedTokens(_Answer):
    cached_tokens: int


class ReasoningTokens(_Answer):
    reasoning_tokens: int


class Usage(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | None = None


class TopLogprob(_Answer):
    token: str
    logprob: float | None
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    content: list[ChatLogprob]
    refusal: None


class AnsweredFunction(_Answer):
    name: str
    arguments: str


class AnsweredCall(_Answer):
    id: str
    type: Literal["function"]
    function: AnsweredFunction


class ChatMessage(_Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredCall] | None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(_Answer):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(_Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(_Answer):
    name: str | None = None
    arguments: str


class ToolCallDelta(_Answer):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(_Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(_Answer):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(_Answer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


class TextLogprobs(_Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class TextChoice(_Answer):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class TextCompletion(_Answer):
    """Chunks of a stream look the same, with usage in the last one only, where asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None


class ResponseAnswer(BaseModel):
    """A response object; the fields of the request come back in it."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]]
    store: Literal[False]
    usage: dict[str, Any] | None


class ResponseEvent(BaseModel):
    type: str
    sequence_number: int


class Model(_Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(_Answer):
    object: Literal["list"]
    data: list[Model]


class Tokens(_Answer):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str | None] | None = None


class Text(_Answer):
    prompt: str


class Version(_Answer):
    version: str


class EngineHealth(_Answer):
    role: Literal["prompt", "completion", "normal"]
    url: str
    ready: bool
    problem: str


class Health(_Answer):
    status: Literal["ready", "not ready", "draining"]
    engines: list[EngineHealth]


class PageStatus(BaseModel):
    """Engines, what they do now, and the last minutes in buckets of time."""

    model: str
    version: str
    is_draining: bool
    num_open_requests: int
    engines: list[dict[str, Any]]
    handovers: list[dict[str, Any]]
    bucket_s: float
    history: list[dict[str, float | None]]


class PageRequest(BaseModel):
    """Times are seconds from the request's last byte on; only the state where the request is unknown."""

    state: Literal["prompt", "hand-over", "completion", "ended", "unknown"]
    engines: list[str] | None = None
    first_token_s: float | None = None
    kv_arrived_s: float | None = None
    ended_s: float | None = None
    num_migrations: int | None = None


class Alive(_Answer):
    status: Literal["alive"] = Field("alive")
