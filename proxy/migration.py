"""Keeps the choices of one prompt going when engines fail under them.

1. run      all choices run on the route that was prepared for them
   pass on  a completion engine leaves the hand-over before its first token: another one takes the same
2. retry    it failed before any token: the whole prompt runs again, on engines that have not failed it
3. migrate  it failed later, or its engine leaves (`departures`): each unfinished choice goes on by itself on
            another route; its prompt and the tokens that its client has are prefilled there and replayed, so
            nothing is generated twice
4. give up  the failure is the request's own (4xx), attempts or time are used up, or no engines are left:
            the failure is the client's

A client that has left cancels `PromptRun.run`; nothing is tried again after that. Requests that an engine has
taken are counted against a limit: one that kills engines must not go through all of them.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import msgspec

from proxy.departures import Departures
from proxy.errors import EngineFailure, EngineLeaves
from proxy.fleet import Engine, EngineStart
from proxy.legs import EngineCalls
from proxy.native.loading import PlainStream
from proxy.pairing import Pair, Route
from proxy.request_flow import PromptWork, run_prompt
from proxy.token_batch import TokenBatch, TokenSink

logger = logging.getLogger(__name__)

MAX_RETRIES = 2
"""Of a whole prompt, before its first token; its client may well try again itself."""
Stage = Literal["handover", "retry", "stream"]

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class MigrationLimits:
    max_migrations: int
    """Of one stream; 0: a failure is the client's at once."""
    wait_s: float
    """How long a broken stream may wait for engines that can go on with it."""


class RouteSource(Protocol):
    def fresh(self, work: PromptWork, failed: frozenset[EngineStart]) -> Route | None:
        """A route for `work` with none of the engines that have failed it; None where there is none now."""

    def any(self, work: PromptWork) -> Route | None:
        """A route for `work`, whatever has failed it."""

    def another_completion(
        self, pair: Pair, work: PromptWork, failed: frozenset[EngineStart]
    ) -> Engine | None:
        """Who is to take the hand-over that the pair's prompt engine keeps; None: nobody now."""

    def started(self, route: Route, work: PromptWork) -> None:
        """An attempt of the work begins on the route."""

    def computed(self, route: Route, token_ids: Sequence[int]) -> None:
        """The route has generated all of these tokens that are not its prompt."""

    async def wait_for_change(self) -> None:
        """Return when some engine has come, gone or changed."""


class FailureObserver(Protocol):
    def check_wanted(self) -> None:
        """Raises CancelledError where the request has been ended meanwhile."""

    def leg_failed(self, failure: EngineFailure, route: Route) -> None:
        """Called for every failure, also for those that the client never hears of."""

    def begun_again(self, reason: str, stage: Stage, route: Route, work: PromptWork) -> None:
        """A computed prompt (`handover`), a whole one (`retry`) or a choice in mid-stream (`stream`) goes on
        at this route."""


class Progress:
    """A choice's sink that remembers how far the choice is."""

    def __init__(self, sink: TokenSink, work: PromptWork) -> None:
        self._sink = sink
        self._max_tokens = work.sampling.max_tokens
        self._began_s = 0.0
        self._is_to_leave = False
        self._plain: PlainStream | None = None
        """Takes the tokens now."""
        self.num_tokens_at_end = work.num_tokens_at_end
        self.token_ids: list[int] = []
        """Without those of a plain stream that still runs."""
        self.is_done = False

    def accept(self, batch: TokenBatch) -> bool:
        wants_more = self._sink.accept(batch)
        if not self.token_ids:
            self._began_s = time.monotonic()
        if len(batch.tokens) == 1:
            self.token_ids.append(batch.tokens[0].token_id)
        else:
            self.token_ids += [token.token_id for token in batch.tokens]
        self.is_done = batch.finish_reason is not None or not wants_more
        return wants_more and not self._is_to_leave

    def begin_plain(self, choice: int, next_index: int) -> PlainStream | None:
        if self._is_to_leave:
            return None
        self._plain = self._sink.begin_plain(choice, next_index)
        return self._plain

    def end_plain(self, plain: PlainStream) -> None:
        self._plain = None
        self.token_ids += plain.token_ids
        self._sink.end_plain(plain)

    @property
    def is_staying(self) -> bool:
        return not (self.is_done or self._is_to_leave)

    @property
    def may_take_s(self) -> float:
        """How long it goes on, at most and at its pace so far; 0 where that is not known yet."""
        num_tokens = len(self.token_ids) + (0 if self._plain is None else self._plain.num_tokens)
        if num_tokens < 2:
            return 0.0
        elapsed_s = time.monotonic() - self._began_s
        return (self._max_tokens - num_tokens) * elapsed_s / (num_tokens - 1)

    def leave(self) -> None:
        """The next token is the last one from where it runs."""
        self._is_to_leave = True
        if self._plain is not None:
            self._plain.stop()

    def stay(self) -> None:
        self._is_to_leave = False


class PromptRun(msgspec.Struct, frozen=True):
    """One prompt and its choices, over all attempts."""

    calls: EngineCalls
    routes: RouteSource
    limits: MigrationLimits
    observer: FailureObserver
    departures: Departures
    new_id: Callable[[], str]
    """Draws hand-over ids."""

    async def run(self, route: Route, work: PromptWork, sinks: Sequence[TokenSink]) -> None:
        """Feed each choice's sink to its end; raises the `EngineFailure` that could not be helped."""
        choices = [Progress(sink, work) for sink in sinks]
        attempts = _Attempts(self, route)
        attempt = work
        while True:
            try:
                await self._attempt(attempts, route, attempt, choices)
            except EngineFailure as failure:
                attempts.failed(failure)
                if any(choice.token_ids for choice in choices):
                    break
                route = attempts.retry(work)
                attempt = attempts.renamed(work)
            else:
                self.routes.computed(attempts.route, [*work.prompt_token_ids, *choices[0].token_ids])
                if all([choice.is_done for choice in choices]):  # noqa: C419 - a generator takes longer
                    return
                attempts.left()
                break
        await self._migrate(attempts, work, choices)

    async def _attempt(
        self, attempts: "_Attempts", route: Route, work: PromptWork, choices: Sequence[Progress]
    ) -> None:
        attempts.start(route, work)
        departures, engine = self.departures, route.engines[-1]
        departures.arrive(engine, choices)

        def pass_on(failure: EngineFailure) -> Engine | None:
            nonlocal engine
            another = attempts.pass_on(failure, work)
            if another is not None:
                departures.depart(engine, choices)
                departures.arrive(another, choices)
                engine = another
            return another

        try:
            await run_prompt(self.calls, route, work, choices, pass_on)
        finally:
            departures.depart(engine, choices)

    async def _migrate(self, attempts: "_Attempts", work: PromptWork, choices: Sequence[Progress]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for number, choice in enumerate(choices):
                    if not choice.is_done:
                        group.create_task(self._go_on(attempts.copy(), work.of_choice(number), choice))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _go_on(self, attempts: "_Attempts", work: PromptWork, choice: Progress) -> None:
        """Run one choice from where it is to its end."""
        while not choice.is_done:
            num_before = len(choice.token_ids)
            if num_before >= work.sampling.max_tokens:
                choice.accept(TokenBatch((), "length"))
                return
            attempt = attempts.renamed(work.after(choice.token_ids))
            route = await attempts.migrate(attempt)
            try:
                await self._attempt(attempts, route, attempt, [choice])
            except EngineFailure as failure:
                if len(choice.token_ids) > num_before:
                    attempts.begin_wait()
                attempts.failed(failure)
            else:
                self.routes.computed(attempts.route, [*work.prompt_token_ids, *choice.token_ids])
                if not choice.is_done:
                    attempts.left()
                    attempts.begin_wait()


class _Attempts:
    """What has been tried for one choice, or for a whole prompt, and what may be tried yet."""

    def __init__(self, run: PromptRun, route: Route) -> None:
        self._run = run
        self.route = route
        """Of the attempt under way; its completion engine is the one that has the hand-over now."""
        self._left: frozenset[EngineStart] = frozenset()
        """Completion engines that have left the hand-over of the attempt under way."""
        self._failed: frozenset[EngineStart] = frozenset()
        self._last: EngineFailure | None = None
        self._num_taken = 0
        """Failures of engines that had taken the request."""
        self._num_names = 0
        self._num_tries = 0
        """Since the stream's client got something."""
        self._deadline_s = 0.0

    def copy(self) -> "_Attempts":
        """The same history for one of several choices."""
        other = _Attempts(self._run, self.route)
        other._failed, other._last, other._num_taken = self._failed, self._last, self._num_taken
        other.begin_wait()
        return other

    def start(self, route: Route, work: PromptWork) -> None:
        self.route, self._left = route, frozenset()
        self._run.routes.started(route, work)

    def pass_on(self, failure: EngineFailure, work: PromptWork) -> Engine | None:
        """Another completion engine for the hand-over of this attempt; the failure is then dealt with."""
        pair, num_taken = self.route, self._num_taken + failure.was_taken
        if not isinstance(pair, Pair) or num_taken > self._run.limits.max_migrations:
            return None
        self._left |= {pair.completion.start}
        another = self._run.routes.another_completion(pair, work, self._failed | self._left)
        if another is None:
            return None
        self._note(failure)
        self.route = replace(pair, completion=another)
        self._begin("handover", work, self.route)
        return another

    def failed(self, failure: EngineFailure) -> None:
        """Raises the failure where nothing may follow it."""
        self._note(failure)
        self._run.observer.check_wanted()
        if not failure.may_pass_elsewhere or self._num_taken > self._run.limits.max_migrations:
            raise failure

    def _note(self, failure: EngineFailure) -> None:
        self._run.observer.leg_failed(failure, self.route)
        self._last = failure
        self._num_taken += failure.was_taken
        self._failed |= {engine.start for engine in self.route.engines if _is_suspect(engine, failure)}

    def left(self) -> None:
        """The engine that decodes drains; what goes on does so elsewhere."""
        engine = self.route.engines[-1]
        self._last = EngineLeaves(engine.role, f"the {engine.role} engine is shutting down")
        self._failed |= {engine.start}

    def begin_wait(self) -> None:
        """The stream's client got something: the time to find engines begins anew."""
        self._deadline_s = asyncio.get_running_loop().time() + self._run.limits.wait_s
        self._num_tries = 0

    def retry(self, work: PromptWork) -> Route:
        """A fresh route for a prompt without tokens; raises the last failure where there is none."""
        assert self._last is not None
        route = None
        if self._num_tries < min(MAX_RETRIES, self._run.limits.max_migrations):
            route = self._run.routes.fresh(work, self._failed)
        if route is None:
            raise self._last
        self._begin("retry", work, route)
        return route

    async def migrate(self, work: PromptWork) -> Route:
        """A route for a choice in mid-stream, which is worth waiting for; raises the last failure."""
        route = self._run.routes.fresh(work, self._failed)
        while route is None:
            await self._pause()
            # Engines fail for moments, too: better again there than never.
            route = self._run.routes.fresh(work, self._failed) or self._run.routes.any(work)
        self._begin("stream", work, route)
        return route

    def renamed(self, work: PromptWork) -> PromptWork:
        """The same work under new names: engines may still be busy with the attempt before."""
        self._num_names += 1
        request_id = f"{work.request_id}.{self._num_names}"
        return msgspec.structs.replace(work, request_id=request_id, handover_id=self._run.new_id())

    def _begin(self, stage: Stage, work: PromptWork, route: Route) -> None:
        assert self._last is not None
        self._num_tries += stage != "handover"
        self._run.observer.begun_again(self._last.kind, stage, route, work)
        logger.info(
            "request_id=%s begins again (%s) at output %d: %s",
            work.request_id,
            stage,
            work.num_replayed_tokens,
            self._last,
        )

    async def _pause(self) -> None:
        """Until an engine changes or a moment has passed; raises the last failure at the deadline."""
        assert self._last is not None
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0**self._num_tries)
        if asyncio.get_running_loop().time() + pause_s > self._deadline_s:
            raise self._last
        self._num_tries += 1
        try:
            async with asyncio.timeout(pause_s):
                await self._run.routes.wait_for_change()
        except TimeoutError:
            pass


def _is_suspect(engine: Engine, failure: EngineFailure) -> bool:
    """Is this engine of the failed route to be avoided?"""
    if failure.is_out_of_room or failure.is_of_recomputed_prompt:
        return False  # it lives, and takes the work back when it has room
    return failure.is_of_handover or engine.role == failure.role
