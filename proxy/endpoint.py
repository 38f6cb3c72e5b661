"""One generation request from its first byte to its last, for both generation endpoints."""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice

from proxy.answers import AnswerShape, Choice, ChoiceClock, StreamedAnswer, WholeAnswer
from proxy.asgi import Receive, Scope, Send
from proxy.client import Client, ClientGone
from proxy.draining import Draining
from proxy.engines import EngineDirectory
from proxy.errors import EngineFailure, EngineRefused, EngineUnreachable, NotServing, ProxyError
from proxy.legs import EngineCalls
from proxy.metrics import ProxyMetrics
from proxy.migration import MigrationLimits, PromptRun, Stage
from proxy.openai_responses import DONE, Kind, ResponseBuilder, Usage, error_frame
from proxy.openai_types import ChatRequest, TextRequest
from proxy.pairing import Pair, Route
from proxy.preparation import Preparation, PreparedPrompt, prompt_field
from proxy.request_flow import PromptWork
from proxy.routes import Routes
from proxy.settings import ProxySettings
from proxy.text_model import TextModel
from proxy.text_stream import TextStream

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class PromptChoices:
    """One prompt of a request and the choices that are generated for it."""

    prompt: PreparedPrompt
    choices: Sequence[Choice]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt.prompt_token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """The prompt is computed once, so its cached tokens count once."""
        return max(choice.num_cached_tokens for choice in self.choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyServices:
    """What every request uses; built once, in `create_app`."""

    settings: ProxySettings
    text: TextModel
    directory: EngineDirectory
    routes: Routes
    preparation: Preparation
    calls: EngineCalls
    metrics: ProxyMetrics
    draining: Draining


class GenerationEndpoint:
    """The ASGI application behind one POST path."""

    def __init__(
        self,
        kind: Kind,
        path: str,
        parse: Callable[[bytes], ChatRequest | TextRequest],
        services: ProxyServices,
    ) -> None:
        self._kind: Kind = kind
        self._path = path
        self._parse = parse
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings = self._services.settings
        client = Client(
            scope,
            receive,
            send,
            stall_timeout_s=settings.client_stall_timeout_s,
            max_backlog_bytes=settings.client_backlog_bytes,
        )
        request_id = secrets.token_hex(16)
        given_id = client.header("x-request-id") or ""
        client.headers["x-request-id"] = given_id if _REQUEST_ID.fullmatch(given_id) else request_id
        exchange = _Exchange(self._kind, self._path, self._services, client, request_id)
        await exchange.run(self._parse)


class _Exchange:
    """The state of one request: how far it is, and what it has counted."""

    def __init__(
        self, kind: Kind, path: str, services: ProxyServices, client: Client, request_id: str
    ) -> None:
        self._kind: Kind = kind
        self._path = path
        self._services = services
        self._client = client
        self._request_id = request_id
        self._prompts: list[PromptChoices] = []
        self._num_migrations = 0
        self._started_s = time.monotonic()

    async def run(self, parse: Callable[[bytes], ChatRequest | TextRequest]) -> None:
        services = self._services
        status = "200"
        try:
            if services.draining.has_begun:
                raise NotServing("this proxy is shutting down", code="shutting_down")
            settings = services.settings
            body = await self._client.read_body(settings.max_body_bytes, settings.body_timeout_s)
            self._started_s = time.monotonic()
            await self._serve_until_client_leaves(parse, body)
        except ClientGone:
            status = "client_left"
            services.metrics.cancellations.labels(self._stage()).inc()
        except ProxyError as error:
            status = str(error.status)
            await self._send_failure(error)
        except Exception:
            status = "500"
            logger.exception("request_id=%s failed inside the proxy", self._request_id)
            await self._send_failure(ProxyError("the proxy failed to serve this request", code="internal"))
        finally:
            await self._client.close()
        services.metrics.requests.labels(self._path, status).inc()
        self._log(status)

    async def _serve_until_client_leaves(
        self, parse: Callable[[bytes], ChatRequest | TextRequest], body: bytes
    ) -> None:
        """Watches the connection from the first moment on: an engine can be silent for seconds."""
        serving = asyncio.create_task(self._serve(parse(body)))
        leaving = asyncio.create_task(self._client.left())
        try:
            await asyncio.wait((serving, leaving, self._client.gave_up), return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                raise ClientGone
            if serving.cancelled():
                raise NotServing(
                    "this proxy was shut down before the answer was complete", code="shutting_down"
                )
            serving.result()
        finally:
            serving.cancel()
            leaving.cancel()
            await asyncio.gather(serving, leaving, return_exceptions=True)

    async def _serve(self, request: ChatRequest | TextRequest) -> None:
        services = self._services
        kind = "true" if request.stream else "false"
        with services.draining.admit(), services.metrics.open_requests.labels(kind).track_inprogress():
            prepared = await services.preparation.prepare(request)
            self._record_routes(prepared)
            answer = self._answer_shape(request)
            self._prompts = self._with_choices(request, prepared, answer)
            try:
                await self._run_prompts()
            except EngineFailure as failure:
                raise _in_client_terms(failure, request) from failure
            self._client.headers["x-tandem-migrations"] = str(self._num_migrations)
            await answer.finish(self._usage())

    @property
    def _choices(self) -> Iterator[Choice]:
        return chain.from_iterable(prompt.choices for prompt in self._prompts)

    def _record_routes(self, prepared: Sequence[PreparedPrompt]) -> None:
        """A fallback to an engine that serves alone must be visible to operators and clients."""
        kinds = ["pair" if isinstance(prompt.route, Pair) else "normal" for prompt in prepared]
        for kind in kinds:
            self._services.metrics.routes.labels(kind).inc()
        self._client.headers["x-tandem-route"] = ",".join(sorted(set(kinds)))

    def _answer_shape(self, request: ChatRequest | TextRequest) -> AnswerShape:
        builder = ResponseBuilder(self._kind, self._request_id, request.model, int(time.time()))
        with_logprobs = request.num_logprobs is not None
        if not request.stream:
            return WholeAnswer(self._client, builder, with_logprobs=with_logprobs)
        return StreamedAnswer(
            self._client, builder, with_logprobs=with_logprobs, include_usage=request.include_usage
        )

    def _with_choices(
        self, request: ChatRequest | TextRequest, prepared: Sequence[PreparedPrompt], answer: AnswerShape
    ) -> list[PromptChoices]:
        """Choices are numbered through, all of a prompt before those of the next."""
        numbers = count()
        return [
            PromptChoices(
                prompt,
                [self._choice(index, request, answer) for index in islice(numbers, prompt.num_completions)],
            )
            for prompt in prepared
        ]

    def _choice(self, index: int, request: ChatRequest | TextRequest, answer: AnswerShape) -> Choice:
        text = TextStream(
            self._services.text.vocabulary,
            stops=request.stop,
            end_token_ids=self._services.text.eos_token_ids | set(request.stop_token_ids or ()),
            with_logprobs=request.num_logprobs is not None,
        )
        clock = ChoiceClock(self._services.metrics, self._path, self._started_s)
        return Choice(text, clock, answer.choice_output(index))

    async def _run_prompts(self) -> None:
        """All prompts at once; the first one that fails ends the others."""
        if len(self._prompts) == 1:
            await self._run_one(0, self._prompts[0])
            return
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
            handover_id=new_handover_id(),
            prompt_token_ids=prompt.prompt_token_ids,
            sampling=prompt.sampling,
            num_completions=prompt.num_completions,
        )
        services = self._services
        limits = MigrationLimits(services.settings.max_migrations, services.settings.migration_wait_s)
        run = PromptRun(services.calls, services.routes, limits, self, new_handover_id)
        await run.run(prompt.route, work, to_run.choices)

    def begun_again(self, reason: str, stage: Stage) -> None:
        self._num_migrations += 1
        self._services.metrics.migrations.labels(reason, stage).inc()

    def leg_failed(self, failure: EngineFailure, route: Route) -> None:
        self._services.metrics.count_failure(failure)
        if failure.status < 500:
            return
        failed = next(engine for engine in route.engines if engine.role == failure.role)
        if isinstance(failure, EngineUnreachable):
            self._services.directory.lost(failed)
            return
        # Either side of a broken hand-over may be the one that restarted.
        for engine in route.engines if isinstance(route, Pair) else (failed,):
            self._services.directory.suspect(engine)

    def _usage(self) -> Usage:
        usage = Usage(
            num_prompt_tokens=sum(prompt.num_prompt_tokens for prompt in self._prompts),
            num_completion_tokens=sum(choice.num_tokens for choice in self._choices),
            num_cached_tokens=sum(prompt.num_cached_tokens for prompt in self._prompts),
        )
        self._services.metrics.count_tokens(
            usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_completion_tokens
        )
        return usage

    def _stage(self) -> str:
        """What the client was waiting for."""
        if not self._prompts:
            return "preparation"
        return "completion" if any(choice.num_tokens for choice in self._choices) else "prompt"

    async def _send_failure(self, error: ProxyError) -> None:
        if self._client.has_started:
            await self._client.end_events(error_frame(error.body) + DONE)
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
            self._path,
            status,
            sum(prompt.num_prompt_tokens for prompt in self._prompts),
            sum(choice.num_tokens for choice in self._choices),
            self._num_migrations,
            time.monotonic() - self._started_s,
        )


def new_handover_id() -> str:
    """Nobody can guess it."""
    return secrets.token_hex(16)


def _in_client_terms(failure: EngineFailure, request: ChatRequest | TextRequest) -> EngineFailure:
    """Engines name the fields of their own bodies; clients know others."""
    if isinstance(failure, EngineRefused) and failure.error.param is not None:
        names = {"prompt_token_ids": prompt_field(request), "sampling.max_tokens": "max_tokens"}
        param = names.get(failure.error.param, failure.error.param.removeprefix("sampling."))
        failure.error = replace(failure.error, param=param)
    return failure
