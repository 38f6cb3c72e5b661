"""The bodies of `/v1/chat/completions` and `/v1/completions`, validated field by field.

Fields nobody knows are ignored (SDKs and gateways add their own); fields of the OpenAI API, or of common
extensions to it, that this proxy cannot honour yet are refused by name unless they ask for nothing.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from proxy.errors import BadRequest
from wire.sampling import MAX_SEED, MAX_TOP_LOGPROBS
from wire.services import MAX_COMPLETIONS

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_PROMPTS = 64


def _join_text_parts(value: object) -> object:
    """`"text"` as it is; `[{"type": "text", "text": ...}, ...]` as its texts, one a line."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise PydanticCustomError(
                "unsupported", "content parts must be of type 'text', got {kind}", {"kind": repr(kind)}
            )
        if not isinstance(part.get("text"), str):
            raise PydanticCustomError("string_type", "a content part of type 'text' needs a string 'text'")
        texts.append(part["text"])
    return "\n".join(texts)


def _as_list_of_stops(value: object) -> object:
    return [value] if isinstance(value, str) else [] if value is None else value


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStringList = Annotated[list[StopString], Field(max_length=MAX_STOPS), BeforeValidator(_as_list_of_stops)]
Content = Annotated[str, BeforeValidator(_join_text_parts)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_served(self) -> Self:
        if self.role in ("tool", "function") or self.tool_calls or self.function_call or self.audio:
            raise PydanticCustomError("unsupported", "tool calls and audio are not supported yet")
        if self.content is None:
            raise PydanticCustomError("missing", "a message needs a 'content'")
        return self

    def for_template(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self.content or ""}
        return message if self.name is None else {**message, "name": self.name}


class StreamOptions(_Strict):
    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


class GenerationRequest(_Strict):
    """What both endpoints take."""

    model: str
    n: int | None = Field(None, ge=1, le=MAX_COMPLETIONS)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    """An extension; 0 and -1 mean no limit."""
    seed: int | None = Field(None, ge=-(2**63), le=MAX_SEED)
    stop: StopStringList = Field(default_factory=list)
    stop_token_ids: list[TokenId] | None = Field(None, max_length=64)
    """An extension, as is `ignore_eos`."""
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "invalid", "stream_options is only allowed with stream: true", {"field": "stream_options"}
            )
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError(
                "invalid", "top_logprobs is only allowed with logprobs: true", {"field": "top_logprobs"}
            )
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise PydanticCustomError(
                "invalid",
                "max_tokens and max_completion_tokens differ; send one of them",
                {"field": "max_tokens"},
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TextRequest(GenerationRequest):
    prompt: Any
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str] | list[list[int]]:
        """`prompt` as a list of texts or of token ids; `BadRequest` where it is neither."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if all(isinstance(item, str) for item in prompt):
                return _checked_count(prompt)
            if _is_token_ids(prompt):
                return [prompt]
            if all(isinstance(item, list) and item and _is_token_ids(item) for item in prompt):
                return _checked_count(prompt)
        raise BadRequest(
            "prompt must be a string, a list of strings, a list of token ids or a list of such lists, "
            "and not empty",
            param="prompt",
            code="invalid_value",
        )


def _checked_count(prompts: list[Any]) -> list[Any]:
    if len(prompts) > MAX_PROMPTS:
        raise BadRequest(
            f"prompt has {len(prompts)} entries; at most {MAX_PROMPTS} are served in one request",
            param="prompt",
        )
    return prompts


def _is_token_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


_ASKS_FOR_NOTHING: Mapping[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "suffix": ("",),
    "echo": (False,),
    "prompt_logprobs": (),
    "audio": (),
    "modalities": (["text"], []),
    "prediction": (),
    "web_search_options": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "cache_salt": (),
    "chat_template": (),
}
"""Fields that are not supported yet, with the values (beside null) that change nothing."""


def parse_json(body: bytes) -> dict[str, Any]:
    """The body's object; refuses malformed or too deeply nested JSON, NaN, and text that is no Unicode."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise BadRequest("the body's JSON is nested too deeply", code="invalid_json") from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    return value


def parse_chat(body: bytes) -> ChatRequest:
    fields = parse_json(body)
    _refuse_unsupported(fields)
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise _bad_request(error) from None


def parse_text(body: bytes) -> TextRequest:
    fields = parse_json(body)
    _refuse_unsupported(fields)
    try:
        return TextRequest.model_validate(fields)
    except ValidationError as error:
        raise _bad_request(error) from None


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    for name, neutrals in _ASKS_FOR_NOTHING.items():
        value = fields.get(name)
        if value is None or any(_is_same(value, neutral) for neutral in neutrals):
            continue
        raise BadRequest(
            f"{name} is not supported by this server yet (got {_shortened(value)})",
            param=name,
            code="unsupported_parameter",
        )


def _is_same(value: object, neutral: object) -> bool:
    """Equality that tells true from 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_CODES = {
    "missing": "missing_required_parameter",
    "unsupported": "unsupported_parameter",
}


def _bad_request(error: ValidationError) -> BadRequest:
    first = error.errors(include_url=False)[0]
    param = _param(first)
    code = _CODES.get(first["type"], "invalid_type" if first["type"].endswith("_type") else "invalid_value")
    return BadRequest(f"{param}: {first['msg']}" if param else first["msg"], param=param, code=code)


def _param(error: ErrorDetails) -> str | None:
    """The field's path as OpenAI writes it, such as `messages[2].content`."""
    context = error.get("ctx") or {}
    if "field" in context:
        return str(context["field"])
    path = ""
    for part in error["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path or None
