"""One generation request from its first byte to its last, for both generation endpoints."""

import asyncio
import logging
import math
import time
from collections.abc import Coroutine, Iterator, Sequence
from itertools import chain, count, islice
from typing import Any

import msgspec

from proxy.activity import Trace
from proxy.admission import Admitted
from proxy.answers import AnswerShape, Choice, ChoiceClock
from proxy.asgi import Receive, Scope, Send
from proxy.client import Client, ClientGone
from proxy.client_terms import in_client_terms, kind_of
from proxy.errors import (
    BadRequest,
    EngineFailure,
    NotServing,
    Overloaded,
    ProxyError,
    RequestTimeout,
)
from proxy.generation_api import AnswerContext, GenerationApi
from proxy.interruption import Interruption
from proxy.kv_transfer_params import FIELD
from proxy.migration import PromptRun, Stage
from proxy.openai_responses import Usage
from proxy.openai_types import ChatRequest, TextRequest
from proxy.pairing import Route
from proxy.preparation import PreparedPrompt
from proxy.proxy_services import ProxyServices
from proxy.request_flow import PromptWork
from proxy.request_ids import HEADER, accepted_id
from proxy.single_legs import CompletionLeg, PromptLeg, SingleLeg, run_completion_leg, run_prompt_leg
from proxy.text_stream import TextStream
from proxy.unguessable import new_id
from settings.secret_keys import bearer_token

logger = logging.getLogger(__name__)


ROUTING_KEY_HEADER = b"x-tandem-routing-key"
"""Requests with the same value are served together where engines run the waiting policy `routing-key`."""


class PromptChoices(msgspec.Struct, frozen=True):
    """One prompt of a request and the choices that are generated for it."""

    prompt: PreparedPrompt
    trace: Trace
    choices: Sequence[Choice]


class GenerationEndpoint:
    """The ASGI application behind one POST path."""

    def __init__(self, api: GenerationApi, services: ProxyServices) -> None:
        self._api = api
        self._services = services

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[None, None, None]:
        client = Client(
            scope,
            receive,
            send,
            stall_timeout_s=self._services.settings.client_stall_timeout_s,
            max_backlog_bytes=self._services.settings.client_backlog_bytes,
        )
        return _Exchange(self._api, self._services, client, self._key(scope)).run()

    def _key(self, scope: Scope) -> str:
        """The key that was checked, in whatever spelling it came; without keys all clients are one."""
        return (bearer_token(scope["headers"]) or "") if self._services.keys.is_required else ""


class _Exchange:
    """The state of one request: how far it is, and what it has counted."""

    def __init__(self, api: GenerationApi, services: ProxyServices, client: Client, key: str) -> None:
        """`key`: the client's, for its limits."""
        self._api = api
        self._services = services
        self._client = client
        self._request_id = new_id()
        self._given_id = accepted_id(client.header(HEADER)) or self._request_id
        client.headers["x-request-id"] = self._given_id
        self._key = key
        self._answer: AnswerShape | None = None
        self._extras: dict[str, Any] = {}
        self._prompts: list[PromptChoices] = []
        self._priority = 0
        self._session: str | None = None
        self._num_migrations = 0
        self._admitted: Admitted | None = None
        self._work: Interruption | None = None
        self._started_s = time.monotonic()

    async def run(self) -> None:
        services = self._services
        status = "200"
        try:
            if services.draining.has_begun:
                raise NotServing("this proxy is shutting down", code="shutting_down")
            settings = services.settings
            body = await self._client.read_body(settings.max_body_bytes, settings.body_timeout_s)
            self._started_s = time.monotonic()
            await self._serve_until_interrupted(body)
        except ClientGone:
            status = "client_left"
            services.metrics.cancellations.labels(self._stage()).inc()
        except ProxyError as error:
            status = str(error.status)
            if isinstance(error, Overloaded):
                services.metrics.refusals.labels(error.reason).inc()
            await self._send_failure(error)
        except Exception:
            status = "500"
            logger.exception("request_id=%s failed inside the proxy", self._request_id)
            await self._send_failure(ProxyError("the proxy failed to serve this request", code="internal"))
        finally:
            await self._client.close()
        services.metrics.requests.labels(self._api.path, status).value += 1
        if logger.isEnabledFor(logging.INFO):
            self._log(status)
        # Choices know this object: nobody but the garbage collector would free what is in a circle.
        self._prompts, self._answer = [], None

    async def _serve_until_interrupted(self, body: bytes) -> None:
        """Watches the connection from the first moment on: an engine can be silent for seconds."""
        request, timeout_s = self._api.parse(body), self._timeout_s()
        services, client = self._services, self._client
        num_open = services.metrics.open_requests.labels("true" if request.stream else "false")
        with Interruption() as self._work, services.key_use.open(self._key):
            cut = self._work.interrupt
            number = services.draining.enter(cut)
            num_open.value += 1
            timer = None if timeout_s is None else self._interrupt_after(timeout_s, self._work)
            client.watch(cut)
            try:
                await self._serve(request)
            finally:
                client.unwatch()
                if timer is not None:
                    timer.cancel()
                num_open.value -= 1
                services.draining.leave(number)

    def _interrupt_after(self, timeout_s: float, work: Interruption) -> asyncio.TimerHandle:
        error = RequestTimeout(f"the answer was not complete within {timeout_s:g} s")
        return asyncio.get_running_loop().call_later(timeout_s, work.interrupt, error)

    def _timeout_s(self) -> float | None:
        """The server's limit, or the client's if it is shorter."""
        limit_s = self._services.settings.request_timeout_s
        given = self._client.header(b"x-request-timeout-s")
        if given is None:
            return limit_s
        try:
            asked_s = float(given)
        except ValueError:
            asked_s = 0.0
        if not 0.0 < asked_s < math.inf:
            raise BadRequest(f"x-request-timeout-s must be a positive number of seconds, got {given!r}")
        return asked_s if limit_s is None else min(asked_s, limit_s)

    async def _serve(self, request: ChatRequest | TextRequest) -> None:
        services = self._services
        self._priority = request.priority or 0
        self._session = self._client.header(b"x-session-id") or request.prompt_cache_key
        prepared = await services.preparation.prepare(request, self._session)
        self._record_routes(prepared)
        answer = self._answer = self._api.answer(request, self._answer_context())
        self._prompts = self._with_choices(request, prepared, answer)
        num_tokens = 0
        for prompt in prepared:
            num_tokens += len(prompt.prompt_token_ids)
        admitted = self._admitted = services.admission.enter(num_tokens, self._priority)
        try:
            if admitted.has_waited:
                await admitted.turn()
            await self._run_prompts()
        except EngineFailure as failure:
            raise in_client_terms(failure, request) from failure
        finally:
            admitted.end(is_computed=False)
        self._client.headers["x-tandem-migrations"] = str(self._num_migrations)
        usage = self._usage()
        services.metrics.count_tokens(
            usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_completion_tokens
        )
        await answer.finish(usage)

    @property
    def _choices(self) -> Iterator[Choice]:
        return chain.from_iterable(prompt.choices for prompt in self._prompts)

    def _record_routes(self, prepared: Sequence[PreparedPrompt]) -> None:
        """A fallback to an engine that serves alone must be visible to operators and clients."""
        kinds = set[str]()
        for prompt in prepared:
            kind = kind_of(prompt.route)
            kinds.add(kind)
            self._services.metrics.routes.labels(kind).value += 1
        self._client.headers["x-tandem-route"] = ",".join(sorted(kinds))

    def _answer_context(self) -> AnswerContext:
        return AnswerContext(
            client=self._client,
            request_id=self._request_id,
            created=int(time.time()),
            usage=self._usage,
            extras=self._extras,
        )

    def _with_choices(
        self, request: ChatRequest | TextRequest, prepared: Sequence[PreparedPrompt], answer: AnswerShape
    ) -> list[PromptChoices]:
        """Choices are numbered through, all of a prompt before those of the next."""
        numbers = count()
        prompts = []
        for index, prompt in enumerate(prepared):
            trace = self._trace(index, prompt.route)
            indices = islice(numbers, prompt.num_completions)
            choices = [self._choice(index, request, prompt, trace, answer) for index in indices]
            prompts.append(PromptChoices(prompt, trace, choices))
        return prompts

    def _trace(self, index: int, route: Route | SingleLeg) -> Trace:
        request_id = f"{self._given_id}-{index}" if index else self._given_id
        return self._services.activity.trace(request_id, route, self._started_s)

    def _choice(
        self,
        index: int,
        request: ChatRequest | TextRequest,
        prompt: PreparedPrompt,
        trace: Trace,
        answer: AnswerShape,
    ) -> Choice:
        model = self._services.text
        end_token_ids = model.eos_token_ids
        if request.stop_token_ids:
            end_token_ids = end_token_ids.union(request.stop_token_ids)
        text = TextStream(
            model.vocabulary,
            stops=request.stop,
            end_token_ids=end_token_ids,
            visible_ids=model.visible_tag_ids if prompt.form.has_parts else frozenset(),
            with_logprobs=request.num_logprobs is not None,
            num_chars_before=0 if prompt.echo is None else len(prompt.echo.text),
        )
        services = self._services
        clock = ChoiceClock(
            services.metrics, services.activity, trace, self._api.path, self._started_s, self._first_token
        )
        out = answer.choice_output(index)
        return Choice(text, prompt.form.parser(), clock, out, model.vocabulary, prompt.echo)

    def _run_prompts(self) -> Coroutine[None, None, None]:
        """All prompts at once."""
        return self._run_one(0, self._prompts[0]) if len(self._prompts) == 1 else self._run_several()

    async def _run_several(self) -> None:
        """The first one that fails ends the others."""
        try:
            async with asyncio.TaskGroup() as group:
                for index, prompt in enumerate(self._prompts):
                    group.create_task(self._run_one(index, prompt))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _run_one(self, index: int, to_run: PromptChoices) -> None:
        prompt = to_run.prompt
        work = PromptWork(
            request_id=f"{self._request_id}-{index}",
            handover_id=new_id(),
            prompt_index=index,
            prompt_token_ids=prompt.prompt_token_ids,
            sampling=prompt.sampling,
            num_completions=prompt.num_completions,
            cache_salt=prompt.cache_salt,
            priority=self._priority,
            routing_key=self._client.header(ROUTING_KEY_HEADER) or "",
            session=self._session,
        )
        activity = self._services.activity
        activity.begin(to_run.trace)
        try:
            if isinstance(prompt.route, PromptLeg | CompletionLeg):
                await self._run_leg(prompt.route, work, to_run.choices)
            else:
                await self._run_route(prompt.route, work, to_run.choices)
        finally:
            activity.end(to_run.trace)

    async def _run_leg(self, leg: SingleLeg, work: PromptWork, choices: Sequence[Choice]) -> None:
        calls = self._services.calls
        self._services.routes.started(leg, work)
        try:
            if isinstance(leg, PromptLeg):
                self._extras[FIELD] = await run_prompt_leg(calls, leg, work, choices)
            else:
                await run_completion_leg(calls, leg, work, choices)
        except EngineFailure as failure:
            self.leg_failed(failure, leg)
            raise

    async def _run_route(self, route: Route, work: PromptWork, choices: Sequence[Choice]) -> None:
        services = self._services
        run = PromptRun(
            services.calls, services.routes, services.migration_limits, self, services.departures, new_id
        )
        has_waited = self._admitted is not None and self._admitted.has_waited
        if has_waited or not services.routes.is_current(route):
            route = services.routes.any(work) or route  # much may have changed since it was chosen
            self._prompts[work.prompt_index].trace.moved(route)
        await run.run(route, work, choices)

    def _first_token(self) -> None:
        if self._admitted is not None:
            self._admitted.end(is_computed=True)

    def check_wanted(self) -> None:
        if self._work is not None:
            self._work.check()

    def begun_again(self, reason: str, stage: Stage, route: Route, work: PromptWork) -> None:
        self._num_migrations += 1
        trace = self._prompts[work.prompt_index].trace
        trace.num_migrations += 1
        trace.moved(route)
        self._services.metrics.migrations.labels(reason, stage).inc()

    def leg_failed(self, failure: EngineFailure, route: Route | SingleLeg) -> None:
        self._services.metrics.count_failure(failure)
        self._services.routes.leg_failed(failure, route)

    def _usage(self) -> Usage:
        num_prompt = num_cached = num_completion = num_reasoning = 0
        for prompt in self._prompts:
            num_prompt += len(prompt.prompt.prompt_token_ids)
            # The prompt is computed once, so its cached tokens count once.
            num_cached += max([choice.num_cached_tokens for choice in prompt.choices])
            for choice in prompt.choices:
                num_completion += choice.num_tokens
                num_reasoning += choice.num_reasoning_tokens
        return Usage(num_prompt, num_completion, num_cached, num_reasoning)

    def _stage(self) -> str:
        """What the client was waiting for."""
        if not self._prompts:
            return "preparation"
        return "completion" if any(choice.num_tokens for choice in self._choices) else "prompt"

    async def _send_failure(self, error: ProxyError) -> None:
        if self._client.has_started:
            assert self._answer is not None
            await self._client.end_events(self._answer.broken(error))
            return
        if any(choice.num_tokens for choice in self._choices):
            # SDKs would repeat what has been generated once already.
            error.headers.setdefault("x-should-retry", "false")
        await self._client.send_error(error)

    def _log(self, status: str) -> None:
        logger.info(
            "request_id=%s path=%s status=%s prompt_tokens=%d completion_tokens=%d migrations=%d "
            "seconds=%.3f",
            self._request_id,
            self._api.path,
            status,
            sum(len(prompt.prompt.prompt_token_ids) for prompt in self._prompts),
            sum(choice.num_tokens for choice in self._choices),
            self._num_migrations,
            time.monotonic() - self._started_s,
        )
