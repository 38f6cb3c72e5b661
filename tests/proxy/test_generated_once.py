"""Engines die, or are slow to answer: what they had accepted is not started at one engine after another."""

import asyncio

import pytest

from tests.proxy.builders import events, stack, until
from tests.proxy.mock_engines import Call, MockEngine
from tests.proxy.test_migration import (
    TEXT,
    TOKENS,
    Fault,
    Generating,
    breaks,
    loses_its_engine,
    stalls,
    streamed,
    whole,
)

NUM_ENGINES = 6
"""All free, and ready to take it."""
DEATHS: dict[str, Fault] = {"its connection breaks": breaks, "it says so": loses_its_engine}


def normal_engines(scripts: Generating, *, has_link: bool) -> list[MockEngine]:
    return [MockEngine("normal", scripts.normal, has_link=has_link) for _ in range(NUM_ENGINES)]


@pytest.mark.parametrize("has_link", [False, True])
@pytest.mark.parametrize("death", DEATHS)
async def test_a_request_whose_engine_dies_before_it_answers_is_generated_by_one_other(
    death: str, has_link: bool
) -> None:
    scripts = Generating({0: DEATHS[death]})
    async with stack(*normal_engines(scripts, has_link=has_link), max_migrations=5) as running:
        assert whole(await streamed(running)) == (TEXT, ["stop"])
        assert sum(len(engine.calls) for engine in running.engines) == 2
        assert scripts.num_generated == len(TOKENS)


@pytest.mark.parametrize("has_link", [False, True])
@pytest.mark.parametrize("death", DEATHS)
async def test_a_handover_whose_engine_dies_before_it_answers_is_generated_by_one_other(
    death: str, has_link: bool
) -> None:
    scripts = Generating({1: DEATHS[death]})
    engines = [MockEngine("prompt", scripts.prompt)]
    engines += [MockEngine("completion", scripts.completion, has_link=has_link) for _ in range(NUM_ENGINES)]
    async with stack(*engines, max_migrations=5) as running:
        response = await running.complete(stream=False)
        assert response.json()["choices"][0]["text"] == TEXT
        prompt, *completions = running.engines
        assert sum(len(engine.calls) for engine in completions) == 2
        assert scripts.num_generated - (len(prompt.calls) - 1) == len(TOKENS)


@pytest.mark.parametrize("has_link", [False, True])
async def test_an_engine_that_is_slow_to_answer_keeps_its_request_to_itself(has_link: bool) -> None:
    scripts, may_answer = Generating(), asyncio.Event()

    async def slow(call: Call) -> None:
        await may_answer.wait()
        await scripts.normal(call)

    engines = [MockEngine("normal", slow, has_link=has_link) for _ in range(NUM_ENGINES)]
    async with stack(*engines, max_migrations=5, refresh_s=0.02) as running:
        asking = asyncio.create_task(running.complete(stream=True))
        await until(lambda: any(engine.calls for engine in engines))
        seen = [engine.num_probes for engine in engines]
        await until(
            lambda: all(engine.num_probes >= 3 + num for engine, num in zip(engines, seen, strict=True))
        )
        may_answer.set()
        assert events((await asking).text)[-1] == "[DONE]"
        assert sum(len(engine.calls) for engine in engines) == 1
        assert scripts.num_generated == len(TOKENS)


@pytest.mark.parametrize("has_link", [False, True])
async def test_an_engine_that_never_answers_has_lost_its_request_when_one_other_generates_it(
    has_link: bool,
) -> None:
    scripts = Generating({0: stalls})
    engines = normal_engines(scripts, has_link=has_link)
    async with stack(*engines, max_migrations=5, first_byte_timeout_s=2.0) as running:
        assert whole(await streamed(running)) == (TEXT, ["stop"])
        calls = (call for engine in engines for call in engine.calls)
        first, _ = sorted(calls, key=lambda call: call.arrived_s)
        await until(first.client_left.is_set, within_s=4.0)
        assert scripts.num_generated == len(TOKENS)
