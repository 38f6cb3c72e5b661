"""From a validated body to what engines need: token ids, limits, sampling and a route per prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.echo import Echo
from proxy.errors import BadRequest, ContextExceeded, NotServing, UnknownModel
from proxy.kv_transfer_params import FIELD
from proxy.message_parser import PLAIN, MessageForm
from proxy.openai_types import ChatRequest, GenerationRequest, TextRequest
from proxy.pairing import (
    HasEngines,
    Route,
    explain_missing_route,
    longest_model_len,
    longest_of_any,
    max_model_len,
    max_pool_tokens,
)
from proxy.routes import Routes
from proxy.single_legs import Bounds, SingleLeg
from proxy.text_model import TextModel
from proxy.unguessable import new_seed
from wire.sampling import MAX_SEED, SamplingParams, StructuredOutput

GREEDY_BELOW = 1e-4
"""Temperatures below this differ from 0 in nothing but overflowing logits."""


class PreparedPrompt(msgspec.Struct, frozen=True):
    """One prompt, ready to run for its choices."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    num_completions: int
    route: Route | SingleLeg
    form: MessageForm
    echo: Echo | None = None
    """What each choice begins with, because the client asked for its prompt."""
    cache_salt: str = ""


class _Rendered(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...]
    form: MessageForm = PLAIN
    echo: Echo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """The operator's, beside those of the engines; None: no limit."""

    max_prompt_tokens: int | None = None
    max_completion_tokens: int | None = None

    def check_prompt(self, num_tokens: int, field: str) -> None:
        if self.max_prompt_tokens is not None and num_tokens > self.max_prompt_tokens:
            raise BadRequest(
                f"{field} has {num_tokens} tokens; this server takes {self.max_prompt_tokens}", param=field
            )

    def of_completion(self, num_tokens: int, asked: tuple[str, int | None]) -> int:
        """Tokens to generate; `BadRequest` where more were asked for than may be."""
        limit, (name, num_asked) = self.max_completion_tokens, asked
        if limit is None or num_tokens <= limit:
            return num_tokens
        if num_asked is None:
            return limit
        raise BadRequest(f"{name} is {num_asked}; this server generates at most {limit}", param=name)


class Preparation:
    """Holds what all requests are prepared with."""

    def __init__(
        self,
        text: TextModel,
        model_names: Sequence[str],
        routes: Routes,
        limits: TokenLimits = TokenLimits(),
    ) -> None:
        self._limits = limits
        self._text = text
        self._model_names = frozenset(model_names)
        self._routes = routes

    async def prepare(
        self, request: ChatRequest | TextRequest, session: str | None = None
    ) -> list[PreparedPrompt]:
        """One entry per prompt; raises `BadRequest` naming the field, or `NotServing`.

        `session`: requests that bear the same one may be sent to the same engines.
        """
        try:
            if request.model not in self._model_names:
                raise UnknownModel(f"the model {request.model!r} does not exist", param="model")
            params = request.kv_transfer_params
            is_leg = params is not None and params.is_of_leg
            longest = longest_of_any if is_leg else longest_model_len
            max_tokens = longest(self._routes.snapshot())
            if max_tokens is None:
                raise self._not_serving()
            sampling = _sampling_fields(request, self._text.vocab_size)
            prompts = await self._rendered(request, max_tokens)
            if is_leg and len(prompts) > 1:
                raise BadRequest(f"{FIELD} are of one prompt, and there are {len(prompts)}", param="prompt")
            return [self._prepare_prompt(request, prompt, sampling, session) for prompt in prompts]
        except RecursionError:  # schemas and messages are walked through in many places
            raise BadRequest("the body's JSON is nested too deeply", code="invalid_json") from None

    def _not_serving(self) -> NotServing:
        reason = explain_missing_route(self._routes.snapshot())
        return NotServing(f"no engines can serve this request: {reason}")

    async def _rendered(self, request: ChatRequest | TextRequest, max_tokens: int) -> list[_Rendered]:
        if isinstance(request, ChatRequest):
            return [await self._chat(request, max_tokens)]
        prompts = request.prompts()
        return [await self._text_prompt(prompt, request, max_tokens) for prompt in prompts]

    async def _chat(self, request: ChatRequest, max_tokens: int) -> _Rendered:
        text, tools = self._text, request.tool_use()
        messages = [message.for_template(request.prompt_field) for message in request.messages]
        prompt = await text.chat_prompt(
            messages,
            max_tokens,
            tools=tools,
            variables=request.template_variables,
            field=request.prompt_field,
        )
        # An answer whose form is given has no room for thoughts.
        thinks = text.thinks and _structured(request) is None
        form = MessageForm(
            tools=tools, tool_format=text.tool_format, thinks=thinks, is_thinking=prompt.is_thinking
        )
        return _Rendered(prompt.token_ids, form)

    async def _text_prompt(self, prompt: str | list[int], request: TextRequest, max_tokens: int) -> _Rendered:
        if isinstance(prompt, str):
            token_ids = await self._text.text_prompt(prompt, max_tokens)
        else:
            token_ids = self._checked_ids(prompt)
        if not request.echo:
            return _Rendered(token_ids)
        text = prompt if isinstance(prompt, str) else await self._text.text_of(token_ids)
        judged_ids = token_ids if request.num_prompt_logprobs is not None else ()
        return _Rendered(token_ids, echo=Echo(text, judged_ids, is_all=request.max_tokens == 0))

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
        self,
        request: ChatRequest | TextRequest,
        rendered: _Rendered,
        sampling: Mapping[str, Any],
        session: str | None,
    ) -> PreparedPrompt:
        """`sampling`: fields of `SamplingParams`, without the limits, which depend on the prompt."""
        if not rendered.token_ids:
            raise BadRequest("the prompt is empty", param=request.prompt_field, code="invalid_value")
        asked, num_prompt_tokens = request.asked_max_tokens, len(rendered.token_ids)
        self._limits.check_prompt(num_prompt_tokens, request.prompt_field)
        params = request.kv_transfer_params
        route: Route | SingleLeg | None
        if params is not None and params.is_of_leg:
            route = self._routes.leg(params, Bounds(self._text.vocab_size, num_prompt_tokens))
        else:
            num_tokens = num_prompt_tokens + (asked[1] or 1)
            route = self._routes.first(rendered.token_ids, num_tokens, session)
        if route is None:
            raise self._not_serving()
        if params is not None and params.do_remote_decode and asked[1] != 0:
            asked = asked[0], None  # routers ask the prompt engine for one token; more follow
        num_allowed = _max_tokens(asked, request.prompt_field, num_prompt_tokens, route)
        max_tokens = self._limits.of_completion(num_allowed, asked)
        return PreparedPrompt(
            rendered.token_ids,
            SamplingParams(**sampling, max_tokens=max_tokens, min_tokens=_min_tokens(request, max_tokens)),
            request.n or 1,
            route,
            rendered.form,
            rendered.echo,
            request.cache_salt or "",
        )


def _max_tokens(
    asked_max_tokens: tuple[str, int | None], prompt_field: str, num_prompt_tokens: int, route: HasEngines
) -> int:
    """What the client asked for, or all that is left; `BadRequest` when it does not fit."""
    limit = max_model_len(route)
    if num_prompt_tokens >= limit:
        raise ContextExceeded.of_prompt(prompt_field, limit, num_prompt_tokens)
    name, asked = asked_max_tokens
    if asked == 0:
        return 1  # engines draw a token behind every prompt
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


def _min_tokens(request: GenerationRequest, max_tokens: int) -> int:
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise BadRequest(
            f"min_tokens ({min_tokens}) is larger than what may be generated ({max_tokens} tokens)",
            param="min_tokens",
            code="invalid_value",
        )
    return min_tokens


def _structured(request: ChatRequest | TextRequest) -> StructuredOutput | None:
    """The form that the client asked for, or that a forced call needs."""
    structured = request.structured_output()
    tools = request.tool_use() if isinstance(request, ChatRequest) else None
    return tools.structured_output() if tools is not None and tools.is_forced else structured


def _check_end_is_free(request: ChatRequest | TextRequest) -> None:
    """A structure says itself where the answer ends."""
    for name in ("min_tokens", "ignore_eos"):
        if getattr(request, name):
            raise BadRequest(
                f"{name} cannot be used where the answer's form is given",
                param=name,
                code="invalid_value",
            )


def _sampling_fields(request: ChatRequest | TextRequest, vocab_size: int) -> Mapping[str, Any]:
    structured = _structured(request)
    if structured is not None:
        _check_end_is_free(request)
    temperature = 1.0 if request.temperature is None else request.temperature
    return {
        "temperature": 0.0 if temperature < GREEDY_BELOW else temperature,
        "top_k": min(max(request.top_k, 0), vocab_size) if request.top_k else 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "min_p": request.min_p or 0.0,
        # Both legs must draw from the same noise; OpenAI's seeds are signed.
        "seed": new_seed() if request.seed is None else request.seed & MAX_SEED,
        "presence_penalty": request.presence_penalty or 0.0,
        "frequency_penalty": request.frequency_penalty or 0.0,
        "repetition_penalty": 1.0 if request.repetition_penalty is None else request.repetition_penalty,
        "logit_bias": _logit_bias(request.logit_bias, vocab_size) if request.logit_bias else (),
        "structured": structured,
        "logprobs": request.num_logprobs,
        "prompt_logprobs": request.num_prompt_logprobs,
        "ignore_eos": bool(request.ignore_eos),
        "stop_token_ids": tuple(request.stop_token_ids or ()),
    }


def _logit_bias(biases: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    by_id = {int(token_id): bias for token_id, bias in biases.items()}
    for token_id in by_id:
        if token_id >= vocab_size:
            raise BadRequest(
                f"logit_bias: token id {token_id} is outside the vocabulary of {vocab_size}",
                param="logit_bias",
                code="invalid_value",
            )
    return tuple(by_id.items())
