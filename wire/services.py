"""HTTP bodies between the proxy and the prompt and completion services. Token ids only, never text."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from wire.sampling import SamplingParams
from wire.transfer import TransferPeer

MAX_COMPLETIONS = 8
"""Choices of one prompt at most."""
MAX_CACHE_SALT_CHARS = 256

EngineRole = Literal["prompt", "completion", "normal"]

FinishReason = Literal[
    "stop",
    "length",
    "abort",
    "prompt_length_exceeded",
    "insufficient_system_resource",
    "structured_output_failed",
    "vision_encoder_failed",
    "handover_withdrawn",
    "error",
]
"""Why a choice ended, or a whole request. `handover_withdrawn` ends a completion leg whose prompt engine took
the hand-over back because the first tokens already ended the request, or because the prompt leg was aborted:
it is no failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, of the unmodified model distribution."""

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputToken:
    """One generated token; `index` counts the request's output tokens from 0."""

    index: int
    token_id: int
    logprobs: TokenLogprobs | None = None


PromptLogprobs: TypeAlias = tuple[TokenLogprobs, ...]
"""Of all prompt tokens but the first, which nothing comes before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEngineAddress:
    """Where a completion engine finds the prompt engine that holds its request's KV blocks."""

    engine_id: str
    epoch: int
    control_address: str
    """ZMQ endpoint of the hand-over protocol, such as `tcp://10.0.0.7:7101`."""


CompletionEngineAddress: TypeAlias = PromptEngineAddress
"""Where a prompt engine finds the completion engine that may have an earlier turn's answer cached."""


def check_num_completions(num_completions: int) -> None:
    """`ValueError` that names the limit."""
    if not 1 <= num_completions <= MAX_COMPLETIONS:
        raise ValueError(f"num_completions must be between 1 and {MAX_COMPLETIONS}, got {num_completions}")


def check_cache_salt(cache_salt: str) -> None:
    """`ValueError` that names the limit."""
    if len(cache_salt) > MAX_CACHE_SALT_CHARS:
        raise ValueError(f"cache_salt has {len(cache_salt)} characters, {MAX_CACHE_SALT_CHARS} are allowed")


def check_replay(
    num_replayed_tokens: int,
    prompt_token_ids: tuple[int, ...],
    sampling: SamplingParams,
    num_completions: int,
) -> None:
    """`ValueError` where the last prompt ids cannot be the beginning of a completion that goes on."""
    if not 0 <= num_replayed_tokens <= max(0, min(len(prompt_token_ids), sampling.max_tokens) - 1):
        raise ValueError(
            f"num_replayed_tokens must leave a prompt and a token of max_tokens {sampling.max_tokens} to "
            f"generate, got {num_replayed_tokens} of {len(prompt_token_ids)} ids"
        )
    if num_replayed_tokens and num_completions > 1:
        raise ValueError(f"num_replayed_tokens needs num_completions 1, got {num_completions}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """Body of `POST /v1/prompt`.

    Choice i of the `num_completions` of a prompt is sampled as `sampling.of_choice(i)`.
    """

    request_id: str
    handover_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    num_completions: int = 1
    num_replayed_tokens: int = 0
    """The last so many of `prompt_token_ids` were generated elsewhere: output 0 and on of a completion that
    goes on here. They count against `max_tokens`, and the next output index is this number."""
    cache_salt: str = ""
    """Only requests with the same salt reuse each other's computed blocks."""
    priority: int = 0
    """With the waiting policy `priority`, the highest first."""
    routing_key: str = ""
    """With the waiting policy `routing-key`: requests with the same key are served together."""
    previous_engine: CompletionEngineAddress | None = None
    """May have more of the prompt cached than the prompt engine: the answers of earlier turns."""

    def __post_init__(self) -> None:
        if self.cache_salt:
            check_cache_salt(self.cache_salt)
        if self.num_completions != 1:
            check_num_completions(self.num_completions)
        if self.num_replayed_tokens:
            check_replay(self.num_replayed_tokens, self.prompt_token_ids, self.sampling, self.num_completions)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChoice:
    """The first token of one choice; `finish_reason` is set when that token already ends the choice."""

    token: OutputToken
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResponse:
    """Answer of `POST /v1/prompt`: the first token of every choice, sampled by the prompt engine.

    `choices` is in order of choice. What is handed over serves those that go on; nothing is where all ended.
    """

    request_id: str
    choices: tuple[PromptChoice, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_logprobs: PromptLogprobs | None = None
    """Where they were asked for, and no output token is replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """Body of `POST /v1/completion`; the answer is a stream of `CompletionEvent` (SSE).

    The status line says whether the engine takes the request at all, at once; what fails later is an event.

    A completion engine needs `handover_id` and `prompt_engine` and streams from output index 1, for the
    choices that did not end with their first token; a NORMAL engine takes neither and streams from index 0.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    num_completions: int = 1
    num_replayed_tokens: int = 0
    """As in `PromptRequest`; the indices that are streamed begin that much later."""
    cache_salt: str = ""
    priority: int = 0
    routing_key: str = ""
    """These as in `PromptRequest`."""
    handover_id: str | None = None
    prompt_engine: PromptEngineAddress | None = None

    def __post_init__(self) -> None:
        if self.cache_salt:
            check_cache_salt(self.cache_salt)
        if self.num_completions != 1:
            check_num_completions(self.num_completions)
        if self.num_replayed_tokens:
            check_replay(self.num_replayed_tokens, self.prompt_token_ids, self.sampling, self.num_completions)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionEvent:
    """One server-sent event of a completion stream: the tokens of one choice in one step, or its end.

    The finish reasons `stop` and `length` end their choice; any other, and `error`, end the stream. A stream
    ends with the last of its choices.
    """

    choice: int = 0
    tokens: tuple[OutputToken, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens found cached; only from a NORMAL engine, the same number in every event."""
    prompt_logprobs: PromptLogprobs | None = None
    """As in `PromptResponse`; only from a NORMAL engine, with output token 0 of every choice."""
    error: "ServiceError | None" = None
    error_status: int | None = None
    """The HTTP status `error` would have had, had it come before the status line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceError:
    """The `error` object of every non-2xx answer and of a failed stream, in OpenAI's shape."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBody:
    error: ServiceError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Answer of `GET /info`: who the engine is, whom it may be paired with, what it can take."""

    role: EngineRole
    engine_id: str
    epoch: int
    model: str
    compatibility_hash: str
    compatibility: dict[str, str] = field(default_factory=dict)
    """The fields behind the hash, so that an error can name the one that differs."""
    control_address: str | None = None
    transport: str | None = None
    peers: tuple[TransferPeer, ...] = ()
    """Completion engine: the prompt engines it has met, and how it reads from each."""
    kernels: str = "torch"
    """What computes the model: native or torch."""
    max_model_len: int
    max_num_seqs: int
    block_size: int
    num_usable_blocks: int
    num_free_blocks: int
    """Blocks that no request uses; some of them may be cached, and are given up when they are needed."""
    zone: str | None = None
    """Where the engine is: blocks move faster within a zone."""
    has_token_link: bool = False
    """It serves `wire.token_link` beside `POST /v1/completion`."""
    version: str
