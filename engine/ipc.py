"""Messages between a service's HTTP process and its engine process: msgpack over two ZMQ ipc sockets.

Both ends belong to the same installation and start together, so there is no version handshake. The engine
sends one `StepEvents` per step however many requests took part in it.
"""

import msgspec

from wire.cache import CacheEvent
from wire.sampling import SamplingParams
from wire.services import (
    CompletionEngineAddress,
    FinishReason,
    OutputToken,
    PromptEngineAddress,
    PromptLogprobs,
    ServiceError,
)
from wire.transfer import TransferPeer


class AddRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A request for the engine. A prompt engine needs `handover_id`; a completion engine needs
    `prompt_engine` too; a NORMAL engine takes neither."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    num_completions: int = 1
    """Choice i is sampled as `sampling.of_choice(i)`."""
    num_replayed_tokens: int = 0
    """The last so many of `prompt_token_ids` are output already; only with one completion."""
    cache_salt: str = ""
    """Only requests with the same salt reuse each other's blocks."""
    priority: int = 0
    routing_key: str = ""
    handover_id: str | None = None
    prompt_engine: PromptEngineAddress | None = None
    previous_engine: CompletionEngineAddress | None = None
    """Prompt engine: may have more of the prompt cached."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Nobody wants this request here any more; unknown ids are ignored."""

    request_id: str
    keeps_handover: bool = False
    """Another completion engine may take what was handed over to this one; whoever asked for it tells the
    prompt engine if none does."""


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """Prompt engine: nobody will take this hand-over; unknown ids are ignored."""

    handover_id: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the process once this message is reached."""


Command = AddRequest | Abort | Withdraw | Shutdown


class RequestFailure(msgspec.Struct, frozen=True):
    """Why a request ended without a finish reason, and the HTTP status that says so."""

    status: int
    error: ServiceError


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one step produced for one choice of a request.

    `finish_reason` ends the choice; `is_last` says that the request has ended and nothing follows. A prompt
    engine's request is over without it once every choice has its first token.
    """

    request_id: str
    choice: int = 0
    tokens: tuple[OutputToken, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    """With output token 0 of every choice, where they were asked for."""
    failure: RequestFailure | None = None
    is_last: bool = False


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and running totals of an engine, sampled after a step or while idle."""

    num_waiting: int
    num_running: int
    num_free_blocks: int
    num_usable_blocks: int
    num_free_slots: int = 0
    num_usable_slots: int = 0
    """State slots; 0 where the model keeps no state."""
    num_handovers: int = 0
    """Prompt engine: hand-overs held for a reader. Completion engine: requests waiting for their KV."""
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_decoded_sequences: int = 0
    """Sequences in decode steps, summed over the steps: each got one token and its accepted drafts."""
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    """Drafts that were verified, and those of them that came true."""
    num_preempted: int = 0
    num_cache_query_tokens: int = 0
    """Tokens of requests when they were admitted."""
    num_cache_hit_tokens: int = 0
    """Of these, those whose KV was in the prefix cache."""
    num_cached_blocks: int = 0
    """Blocks that the prefix cache owns, in use or not."""
    num_evicted_blocks: int = 0
    num_placeholder_steps: int = 0
    """Steps that ran empty here because another rank of the group had something to run."""
    group_wait_s: float = 0.0
    """Time spent waiting for other ranks."""
    busy_s: float = 0.0
    transfer: dict[str, float] = {}
    """Counters of the hand-over protocol and its transport, by name."""
    peers: tuple[TransferPeer, ...] = ()
    """The engines at the other end of hand-overs."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """A stage of loading has begun; `fraction` of the whole start lies behind it."""

    stage: str
    fraction: float


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine accepts requests."""

    model: str
    compatibility_hash: str
    compatibility: dict[str, str]
    control_address: str | None
    transport: str | None
    kernels: str
    """What computes the model: native or torch."""
    max_model_len: int
    vocab_size: int
    stats: EngineStats


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start, with one line that says what to do; restarting would not help."""

    message: str


class GroupEnded(msgspec.Struct, frozen=True, tag=True):
    """The engine ends because its group has; another engine in its place can form the group again."""

    message: str


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """The process lives."""


class StepEvents(msgspec.Struct, frozen=True, tag=True):
    outputs: tuple[RequestOutput, ...]
    stats: EngineStats
    cache_events: tuple[CacheEvent, ...] = ()


Event = Progress | Ready | StartFailed | GroupEnded | Pulse | StepEvents

_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode(message: Command | Event) -> bytes:
    return _encoder.encode(message)


def decode_command(frame: bytes) -> Command:
    return _command_decoder.decode(frame)


def decode_event(frame: bytes) -> Event:
    return _event_decoder.decode(frame)
