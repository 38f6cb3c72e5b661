"""From a validated body to what engines need: token ids, limits, sampling and a route per prompt."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.errors import BadRequest, ContextExceeded, NotServing, UnknownModel
from proxy.openai_types import ChatRequest, GenerationRequest, TextRequest
from proxy.pairing import (
    Route,
    explain_missing_route,
    longest_model_len,
    max_model_len,
    max_pool_tokens,
)
from proxy.routes import Routes
from proxy.text_model import TextModel
from wire.sampling import MAX_SEED, SamplingParams

GREEDY_BELOW = 1e-4
"""Temperatures below this differ from 0 in nothing but overflowing logits."""


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """One prompt, ready to run for its choices."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    num_completions: int
    route: Route


class Preparation:
    """Holds what all requests are prepared with."""

    def __init__(self, text: TextModel, model_names: Sequence[str], routes: Routes) -> None:
        self._text = text
        self._model_names = frozenset(model_names)
        self._routes = routes

    async def prepare(self, request: ChatRequest | TextRequest) -> list[PreparedPrompt]:
        """One entry per prompt; raises `BadRequest` naming the field, or `NotServing`."""
        if request.model not in self._model_names:
            raise UnknownModel(f"the model {request.model!r} does not exist", param="model")
        max_tokens = longest_model_len(self._routes.snapshot())
        if max_tokens is None:
            raise self._not_serving()
        prompts = await self._token_ids(request, max_tokens)
        return [self._prepare_prompt(request, prompt) for prompt in prompts]

    def _not_serving(self) -> NotServing:
        reason = explain_missing_route(self._routes.snapshot())
        return NotServing(f"no engines can serve this request: {reason}")

    async def _token_ids(self, request: ChatRequest | TextRequest, max_tokens: int) -> list[tuple[int, ...]]:
        text = self._text
        if isinstance(request, ChatRequest):
            messages = [message.for_template() for message in request.messages]
            return [await text.chat_prompt(messages, max_tokens)]
        return [
            await text.text_prompt(prompt, max_tokens)
            if isinstance(prompt, str)
            else self._checked_ids(prompt)
            for prompt in request.prompts()
        ]

    def _checked_ids(self, token_ids: list[int]) -> tuple[int, ...]:
        limit = self._text.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < limit:
                raise BadRequest(
                    f"prompt: token id {token_id} is outside the vocabulary of {limit}",
                    param="prompt",
                    code="invalid_value",
                )
        return tuple(token_ids)

    def _prepare_prompt(
        self, request: ChatRequest | TextRequest, prompt_token_ids: tuple[int, ...]
    ) -> PreparedPrompt:
        if not prompt_token_ids:
            raise BadRequest("the prompt is empty", param=prompt_field(request), code="invalid_value")
        route = self._routes.first()
        if route is None:
            raise self._not_serving()
        max_tokens = _max_tokens(request, len(prompt_token_ids), route)
        sampling = _sampling(request, max_tokens, self._text.vocab_size)
        return PreparedPrompt(prompt_token_ids, sampling, request.n or 1, route)


def prompt_field(request: ChatRequest | TextRequest) -> str:
    return "messages" if isinstance(request, ChatRequest) else "prompt"


def _max_tokens(request: ChatRequest | TextRequest, num_prompt_tokens: int, route: Route) -> int:
    """What the client asked for, or all that is left; `BadRequest` when it does not fit."""
    limit = max_model_len(route)
    if num_prompt_tokens >= limit:
        raise ContextExceeded.of_prompt(prompt_field(request), limit, num_prompt_tokens)
    name, asked = _asked_max_tokens(request)
    if asked is None:
        in_pool = max(1, max_pool_tokens(route) - num_prompt_tokens)
        return min(limit - num_prompt_tokens, in_pool)
    if num_prompt_tokens + asked > limit:
        raise ContextExceeded(
            f"{name} is too large: this model's maximum context length is {limit} tokens, and the request "
            f"asks for {num_prompt_tokens + asked} ({num_prompt_tokens} in the prompt, {asked} of {name})",
            param=name,
        )
    return asked


def _asked_max_tokens(request: GenerationRequest) -> tuple[str, int | None]:
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return "max_completion_tokens", request.max_completion_tokens
    return "max_tokens", request.max_tokens


def _sampling(request: ChatRequest | TextRequest, max_tokens: int, vocab_size: int) -> SamplingParams:
    temperature = 1.0 if request.temperature is None else request.temperature
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=min(max(request.top_k or 0, 0), vocab_size),
        top_p=1.0 if request.top_p is None else request.top_p,
        # Both legs must draw from the same noise; OpenAI's seeds are signed.
        seed=secrets.randbits(63) if request.seed is None else request.seed & MAX_SEED,
        logprobs=request.num_logprobs,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=tuple(request.stop_token_ids or ()),
    )
