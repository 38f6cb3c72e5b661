"""One leg of a request on its own, for routers of others that send the two legs themselves.

Public prefill/decode routers put `kv_transfer_params` into an ordinary request:

    1. to a prompt engine, with `do_remote_decode`; the answer has one token and `kv_transfer_params` too
    2. to a completion engine, the same request with those params, which say `do_remote_prefill`

Both go to a proxy that knows these engines. Which engine holds the blocks is looked up by its id among the
configured ones: nothing that a request says is taken for an address. What step 1 found out (first tokens, the
hand-over's id) travels in a field of ours, which routers pass on as they got it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from proxy.errors import BadRequest, EngineFailure, NotServing, failure_from_finish
from proxy.fleet import Engine, FleetSnapshot
from proxy.kv_transfer_params import FIELD, KvTransferParams
from proxy.legs import EngineCalls
from proxy.relay import Relay
from proxy.request_flow import PromptWork
from proxy.text_stream import EndOfText
from proxy.token_batch import TokenBatch, TokenSink
from wire.services import (
    CompletionRequest,
    OutputToken,
    PromptChoice,
    PromptEngineAddress,
    PromptRequest,
    PromptResponse,
)


@dataclass(frozen=True, slots=True)
class PromptLeg:
    """The prompt is computed and kept for whoever comes for it."""

    prompt: Engine

    @property
    def engines(self) -> tuple[Engine, ...]:
        return (self.prompt,)


@dataclass(frozen=True, slots=True)
class CompletionLeg:
    """A computed prompt is fetched and its completion generated."""

    completion: Engine
    prompt: Engine
    handover_id: str
    computed: PromptResponse

    @property
    def engines(self) -> tuple[Engine, ...]:
        return (self.completion,)


SingleLeg = PromptLeg | CompletionLeg


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an answer to this request's prompt leg can hold."""

    vocab_size: int
    num_prompt_tokens: int

    def hold(self, computed: PromptResponse) -> bool:
        """Engines say nothing else; a client that made it up could, and it would be taken for their fault."""
        if computed.prompt_logprobs is not None:
            return False  # nobody can ask for them in two legs
        return 0 <= computed.num_cached_tokens <= self.num_prompt_tokens and all(
            choice.finish_reason in (None, "stop", "length") and self._hold_token(choice.token)
            for choice in computed.choices
        )

    def _hold_token(self, token: OutputToken) -> bool:
        logprobs = token.logprobs
        top_ids = () if logprobs is None else logprobs.top_token_ids
        num_tops = 0 if logprobs is None else len(logprobs.top_logprobs)
        are_known = all(0 <= token_id < self.vocab_size for token_id in (token.token_id, *top_ids))
        return are_known and token.index == 0 and len(top_ids) == num_tops


def leg_of(
    params: KvTransferParams, fleet: FleetSnapshot, loads: Mapping[str, int], bounds: Bounds
) -> SingleLeg:
    """The leg that the params ask for, at the engine with the least to do."""
    if params.do_remote_decode:
        return PromptLeg(_least_loaded(fleet.routable("prompt"), loads, "prompt"))
    prompt = _holder(params, fleet)
    assert prompt.info is not None
    fitting = [
        engine
        for engine in fleet.routable("completion")
        if engine.info is not None and engine.info.compatibility_hash == prompt.info.compatibility_hash
    ]
    handover_id, computed = _told(params, bounds)
    return CompletionLeg(_least_loaded(fitting, loads, "completion"), prompt, handover_id, computed)


def _least_loaded(engines: Sequence[Engine], loads: Mapping[str, int], role: str) -> Engine:
    if not engines:
        raise NotServing(f"no {role} engine can serve this request")
    return min(engines, key=lambda engine: loads.get(engine.url, 0))


def _holder(params: KvTransferParams, fleet: FleetSnapshot) -> Engine:
    for engine in fleet.engines:
        if engine.info is not None and engine.info.engine_id == params.remote_engine_id:
            return engine
    raise BadRequest(
        f"{FIELD}.remote_engine_id: no engine {params.remote_engine_id!r} is configured here",
        param=f"{FIELD}.remote_engine_id",
        code="invalid_value",
    )


def _told(params: KvTransferParams, bounds: Bounds) -> tuple[str, PromptResponse]:
    told = params.tandem or {}
    refusal = BadRequest(
        f"{FIELD}.tandem is not what a prompt engine answered", param=f"{FIELD}.tandem", code="invalid_value"
    )
    try:
        handover_id, computed = str(told["handover_id"]), msgspec.convert(told["computed"], PromptResponse)
    except (KeyError, msgspec.ValidationError):
        raise refusal from None
    if not bounds.hold(computed):
        raise refusal
    return handover_id, computed


def params_for_completion(leg: PromptLeg, handover_id: str, computed: PromptResponse) -> dict[str, Any]:
    """What the router has to send to the completion engine."""
    info = leg.prompt.info
    assert info is not None
    address = urlsplit(info.control_address or "")
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": info.engine_id,
        "remote_block_ids": [],
        "remote_host": address.hostname,
        "remote_port": address.port,
        "tandem": {"handover_id": handover_id, "computed": msgspec.to_builtins(computed)},
    }


async def run_prompt_leg(
    calls: EngineCalls, leg: PromptLeg, work: PromptWork, sinks: Sequence[TokenSink]
) -> dict[str, Any]:
    """Give each sink its first token, as all there is; returns the params for the other leg."""
    body = PromptRequest(
        request_id=work.request_id,
        handover_id=work.handover_id,
        prompt_token_ids=work.prompt_token_ids,
        sampling=work.sampling,
        num_completions=work.num_completions,
        cache_salt=work.cache_salt,
        priority=work.priority,
    )
    try:
        computed = await calls.prompt(leg.prompt, body)
    except BaseException:
        calls.withdraw(leg.prompt, work.handover_id)  # the answer may just have been on its way
        raise
    for first, sink in zip(computed.choices, sinks, strict=True):
        end = _end(leg.prompt, first) or "length"
        sink.accept(TokenBatch((first.token,), end, computed.num_cached_tokens))
    return params_for_completion(leg, work.handover_id, computed)


async def run_completion_leg(
    calls: EngineCalls, leg: CompletionLeg, work: PromptWork, sinks: Sequence[TokenSink]
) -> None:
    """Feed the sinks with the first tokens that came with the request and the engine's from then on."""
    choices = leg.computed.choices
    if len(choices) != work.num_completions:
        raise BadRequest(
            f"the prompt was computed for {len(choices)} choices, {work.num_completions} are asked for",
            param="n",
            code="invalid_value",
        )
    ends = [_end(leg.completion, choice) for choice in choices]
    going_on = [choice for choice, end in enumerate(ends) if end is None]
    if not going_on:
        _accept_firsts(leg, ends, sinks)
        return
    timeouts, may_be_held = calls.timeouts, True
    try:
        async with calls.completion(leg.completion, _body(leg, work), timeouts.first_byte_s) as stream:
            wanted = _accept_firsts(leg, ends, sinks)
            batch = await stream.next_batch(timeouts.first_byte_s)
            may_be_held = not batch.parts
            await Relay(leg.completion, going_on, wanted, next_index=1).run(stream, batch, timeouts.stall_s)
    except EngineFailure as failure:
        may_be_held = may_be_held and not failure.leaves_handover  # the router may take it to another engine
        raise
    finally:
        if may_be_held:
            calls.withdraw(leg.prompt, leg.handover_id)


def _accept_firsts(
    leg: CompletionLeg, ends: Sequence[EndOfText | None], sinks: Sequence[TokenSink]
) -> dict[int, TokenSink]:
    """The sinks that want more."""
    wanted = {}
    for index, (first, end) in enumerate(zip(leg.computed.choices, ends, strict=True)):
        batch = TokenBatch((first.token,), end, leg.computed.num_cached_tokens)
        if sinks[index].accept(batch) and end is None:
            wanted[index] = sinks[index]
    return wanted


def _body(leg: CompletionLeg, work: PromptWork) -> CompletionRequest:
    info = leg.prompt.info
    assert info is not None
    assert info.control_address is not None
    return CompletionRequest(
        request_id=work.request_id,
        prompt_token_ids=work.prompt_token_ids,
        sampling=work.sampling,
        num_completions=work.num_completions,
        cache_salt=work.cache_salt,
        priority=work.priority,
        handover_id=leg.handover_id,
        prompt_engine=PromptEngineAddress(
            engine_id=info.engine_id, epoch=info.epoch, control_address=info.control_address
        ),
    )


def _end(engine: Engine, choice: PromptChoice) -> EndOfText | None:
    reason = choice.finish_reason
    if reason is None or reason == "stop" or reason == "length":
        return reason
    raise failure_from_finish(engine.role, reason)
