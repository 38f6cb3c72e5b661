"""The bodies of `/v1/chat/completions` and `/v1/completions`.

Fields nobody knows are ignored (SDKs and gateways add their own), and so are those that change nothing for
the answer, such as `user`, `metadata`, `store` or `service_tier`. Fields of the OpenAI API, or of common
extensions to it, that this proxy cannot honour are refused by name unless they ask for nothing.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from proxy.body_parsing import Strict, parse_body
from proxy.chat_messages import Message
from proxy.errors import BadRequest
from proxy.kv_transfer_params import KvTransferParams
from proxy.structured_fields import StructuredFields
from proxy.tools.choice import ToolUse, tool_use
from proxy.tools.definitions import ToolChoice, ToolList
from wire.sampling import MAX_LOGIT_BIASES, MAX_SEED, MAX_TOP_LOGPROBS
from wire.services import MAX_CACHE_SALT_CHARS, MAX_COMPLETIONS

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_PROMPTS = 64


def _as_list_of_stops(value: object) -> object:
    return [value] if isinstance(value, str) else [] if value is None else value


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStringList = Annotated[
    list[StopString],
    Field(max_length=MAX_STOPS),
    BeforeValidator(
        _as_list_of_stops,
        json_schema_input_type=StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None,
    ),
]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenIdText = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """An extension: every chunk carries the usage so far. It needs `include_usage`."""


class SamplingFields(StructuredFields):
    """How an answer is generated, for every endpoint that does."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    """An extension; 0 and -1 mean no limit."""
    min_p: float | None = Field(None, ge=0, le=1)
    """An extension, as are `repetition_penalty`, `min_tokens`, `stop_token_ids` and `ignore_eos`."""
    seed: int | None = Field(None, ge=-(2**63), le=MAX_SEED)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[TokenIdText, Bias] | None = Field(None, max_length=MAX_LOGIT_BIASES)
    min_tokens: int | None = Field(None, ge=0)
    stop: StopStringList = Field(default_factory=list)
    stop_token_ids: list[TokenId] | None = Field(None, max_length=64)
    ignore_eos: bool | None = None
    cache_salt: str | None = Field(None, max_length=MAX_CACHE_SALT_CHARS)
    """An extension: only requests with the same salt share cached prompts."""
    prompt_cache_key: str | None = None
    """Requests with the same one are a session, as those with the same header x-session-id are."""
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    """An extension: the highest goes first where engines run the waiting policy `priority`."""


class GenerationRequest(SamplingFields):
    """What both endpoints take; how errors name their fields."""

    prompt_field: ClassVar[str]

    model: str
    n: int | None = Field(None, ge=1, le=MAX_COMPLETIONS)
    best_of: int | None = None
    """Only as many as `n`: nothing is generated to be thrown away."""
    max_tokens: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    kv_transfer_params: KvTransferParams | None = None
    """From a router of others, which drives the two legs itself."""

    @model_validator(mode="after")
    def _fields_go_together(self) -> Self:
        if self.stream and self.kv_transfer_params is not None and self.is_prompt_leg:
            raise PydanticCustomError("invalid", "not allowed with do_remote_decode", {"field": "stream"})
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "invalid", "only allowed with stream: true", {"field": "stream_options"}
            )
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise PydanticCustomError("unsupported", "only supported when it equals n", {"field": "best_of"})
        return self

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives to each of the prompt's own tokens; None: nothing of them is asked for."""
        return None

    @property
    def is_prompt_leg(self) -> bool:
        return bool(self.kv_transfer_params and self.kv_transfer_params.do_remote_decode)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def asked_max_tokens(self) -> tuple[str, int | None]:
        """The limit and the field it came in."""
        return "max_tokens", self.max_tokens


class ChatRequest(GenerationRequest):
    prompt_field: ClassVar[str] = "messages"

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: ToolList | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    """Passed to the chat template, as `chat_template_kwargs` are, which is an extension."""
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError(
                "invalid", "only allowed with logprobs: true", {"field": "top_logprobs"}
            )
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise PydanticCustomError(
                "invalid",
                "differs from max_completion_tokens; send one of them",
                {"field": "max_tokens"},
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def asked_max_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def template_variables(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}

    def tool_use(self) -> ToolUse | None:
        """What the answer may call; None when there are no tools, `BadRequest` for an impossible choice."""
        wish = tool_use(self.tools or [], self.tool_choice, self.parallel_tool_calls is not False)
        if wish is not None and wish.is_forced and self.structured_output() is not None:
            raise BadRequest(
                f"tool_choice cannot force a call beside {self.structured_field}",
                param="tool_choice",
                code="invalid_value",
            )
        return wish


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA: dict[str, Any] = {
    "title": "Prompt",
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ],
}


class TextRequest(GenerationRequest):
    prompt_field: ClassVar[str] = "prompt"

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: int | None = Field(None, ge=0)
    """0: nothing but the echo."""
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("invalid", "0 is only allowed with echo: true", {"field": "max_tokens"})
        if self.kv_transfer_params is not None and self.num_prompt_logprobs is not None:
            raise PydanticCustomError(
                "unsupported",
                "not supported with echo and kv_transfer_params",
                {"field": "logprobs"},
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

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


ASKS_FOR_NOTHING: Mapping[str, tuple[object, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "use_beam_search": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "audio": (),
    "modalities": (["text"], []),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "chat_template": (),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Fields that are not supported, with the values (beside null) that change nothing."""

_IN_CHAT = {**ASKS_FOR_NOTHING, "echo": (False,)}
_IN_TEXT = {**ASKS_FOR_NOTHING, "tools": ([],), "tool_choice": ("none", "auto")}


def parse_chat(body: bytes) -> ChatRequest:
    return parse_body(ChatRequest, body, _IN_CHAT)


def parse_text(body: bytes) -> TextRequest:
    return parse_body(TextRequest, body, _IN_TEXT)
