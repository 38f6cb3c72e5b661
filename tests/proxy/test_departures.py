"""Streams are moved off engines that drain: those that would be cut, a few at a time, the longest first."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from proxy.departures import Departures, to_move
from proxy.fleet import Engine, EngineStart
from tests.proxy.builders import Stack, ids, stack, until
from tests.proxy.mock_engines import Call, MockEngine, token
from tests.proxy.test_migration import TEXT, TOKENS, Generating, streamed, whole
from wire.services import PromptChoice

ENGINE = Engine(url="http://a", role="completion")


@dataclass(eq=False)
class Choice:
    may_take_s: float
    num_tokens_at_end: int = 10
    is_staying: bool = True

    def leave(self) -> None:
        self.is_staying = False

    def stay(self) -> None:
        self.is_staying = True


@dataclass
class Fleet:
    """Engines that the test lets leave, and the longest request that others would take."""

    num_tokens: int = 100
    left_s: dict[EngineStart, float] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def leaving(self) -> dict[EngineStart, float]:
        return self.left_s

    def longest(self) -> int:
        return self.num_tokens

    async def wait_for_change(self) -> None:
        await self.changed.wait()


@asynccontextmanager
async def leaving(fleet: Fleet, choices: Sequence[Choice], left_s: float) -> AsyncIterator[None]:
    departures = Departures(fleet)
    running = asyncio.create_task(departures.run())
    departures.arrive(ENGINE, choices)
    await asyncio.sleep(0)
    fleet.left_s[ENGINE.start] = left_s
    fleet.changed.set()
    yield
    departures.depart(ENGINE, choices)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def until_left(*choices: Choice) -> None:
    await until(lambda: not any(choice.is_staying for choice in choices))


def test_what_may_take_longer_than_half_of_the_time_leaves_the_longest_first() -> None:
    short, long, longest = Choice(4.9), Choice(5.1), Choice(100.0)
    assert to_move([short, long, longest], 10.0) == [longest]
    assert to_move([short, long], 10.0) == [long]
    assert to_move([short], 10.0) == []


def test_those_that_leave_are_spread_over_half_of_the_time() -> None:
    choices = [Choice(100.0) for _ in range(100)]
    assert len(to_move(choices, 20.0)) == 1
    assert len(to_move(choices, 2.0)) == 10
    assert len(to_move(choices, 0.0)) == 100


def test_nobody_is_told_twice() -> None:
    assert to_move([Choice(100.0, is_staying=False)], 1.0) == []


async def test_all_long_streams_of_a_draining_engine_are_told_in_time_and_short_ones_are_not() -> None:
    long, short = [Choice(100.0) for _ in range(10)], Choice(0.1)
    async with leaving(Fleet(), [*long, short], 2.0):
        await until_left(*long)
    assert short.is_staying


async def test_a_stream_that_nobody_else_takes_stays_until_somebody_does() -> None:
    fleet = Fleet(num_tokens=50)
    small, large = Choice(100.0, num_tokens_at_end=50), Choice(100.0, num_tokens_at_end=51)
    async with leaving(fleet, [small, large], 1.0):
        await until_left(small)
        assert large.is_staying
        fleet.num_tokens = 51
        await until_left(large)


async def test_an_engine_that_was_started_again_keeps_its_streams() -> None:
    departures, choice = Departures(Fleet()), Choice(100.0)
    departures.arrive(ENGINE, [choice])
    departures._tell(EngineStart(ENGINE.url, 1), 0.0)
    assert choice.is_staying
    departures.depart(ENGINE, [choice])
    assert not departures._staying


@asynccontextmanager
async def two_completions(scripts: Generating, *, has_link: bool, **settings: object) -> AsyncIterator[Stack]:
    engines = [MockEngine("prompt", scripts.prompt)]
    engines += [MockEngine("completion", scripts.completion, has_link=has_link) for _ in range(2)]
    async with stack(*engines, **{"max_migrations": 0, **settings}) as running:
        yield running


@pytest.mark.parametrize("has_link", [True, False])
async def test_a_stream_leaves_a_draining_engine_and_nothing_is_lost_or_generated_twice(
    has_link: bool,
) -> None:
    """A failure would be the client's: migrations are not allowed, leaving needs none."""

    async def drains(call: Call) -> None:
        """At output 7, in the middle of a stream that goes on."""
        (engine,) = (engine for engine in running.engines if call in engine.calls)
        await engine.drain(grace_s=0.5)
        for index in range(7, len(TOKENS)):
            await asyncio.sleep(0.15)  # a pace at which it would be cut
            await call.tokens(index, [TOKENS[index]])

    scripts = Generating({7: drains})
    refresh_s = 60.0 if has_link else 0.05  # a link tells without being asked
    async with two_completions(scripts, has_link=has_link, refresh_s=refresh_s) as running:
        chunks = await streamed(running, max_tokens=200, stream_options={"include_usage": True})
        *chunks, usage = chunks
        assert whole(chunks) == (TEXT, ["stop"])
        assert usage["usage"]["completion_tokens"] == len(TOKENS)
        assert running.metric("tandem_proxy_migrations_total", reason="draining", stage="stream") == 1
        assert sum(len(engine.calls) for engine in running.engines[1:]) == 2
        assert not running.services.departures._staying


async def test_a_draining_engine_gets_nothing_new_from_the_moment_its_link_says_so() -> None:
    scripts = Generating()
    async with two_completions(scripts, has_link=True) as running:
        for _ in range(2):
            await running.complete()
        first = running.engines[1]
        await first.drain(grace_s=30.0)
        async with asyncio.timeout(5):
            while running.services.directory.snapshot().engines[1].is_ready:
                await running.services.directory.wait_for_change()
        num_before = len(first.calls)
        for _ in range(4):
            assert (await running.complete()).status_code == 200
        assert len(first.calls) == num_before


async def test_every_choice_leaves_by_itself_with_its_own_seed() -> None:
    texts = ["abcdefgh", "ijklmnop", "qrstuvwx"]
    seeds: list[int] = []
    moved: list[tuple[int, int]] = []

    def of(call: Call) -> tuple[int, int]:
        """The choice that a request of its own goes on with, and where."""
        request = call.completion_request
        return seeds.index(request.sampling.seed), request.num_replayed_tokens

    async def prompt(call: Call) -> None:
        request = call.completion_request
        if request.num_completions == 3:
            seeds.extend(request.sampling.of_choice(choice).seed for choice in range(3))
            await call.first_tokens(*(PromptChoice(token=token(0, ids(text)[0])) for text in texts))
            return
        choice, index = of(call)
        moved.append((choice, index))
        await call.first_tokens(PromptChoice(token=token(index, ids(texts[choice])[index])))

    async def completion(call: Call) -> None:
        await call.accept()
        if call.completion_request.num_completions == 3:
            for index in range(1, 8):
                for choice in (0, 1, 2):
                    await call.tokens(index, ids(texts[choice])[index : index + 1], choice=choice)
                if index == 2:
                    (engine,) = (engine for engine in running.engines if call in engine.calls)
                    await engine.drain(grace_s=0.5)
                await asyncio.sleep(0.15)
            return
        choice, index = of(call)
        await call.tokens(index + 1, ids(texts[choice])[index + 1 :], finish_reason="length")
        await call.end()

    engines = [MockEngine("prompt", prompt)]
    engines += [MockEngine("completion", completion, has_link=True) for _ in range(2)]
    async with stack(*engines, max_migrations=0) as running:
        response = await running.complete(n=3, max_tokens=8)
    assert [choice["text"] for choice in response.json()["choices"]] == texts
    assert sorted(choice for choice, _ in moved) == [0, 1, 2]
    assert all(index > 2 for _, index in moved)
    assert response.headers["x-tandem-migrations"] == "3"
    assert response.json()["usage"]["completion_tokens"] == 24
