"""A completion engine leaves a hand-over before its first token: another takes the same one."""

import asyncio

import pytest

from tests.proxy.builders import stack, until
from tests.proxy.mock_engines import Call, MockEngine, Script
from tests.proxy.test_migration import (
    TEXT,
    Generating,
    breaks,
    has_no_room_for_arrivals,
    loses_its_engine,
    loses_its_peer,
    refuses,
)
from wire.services import CompletionEvent, ServiceError


async def is_too_busy(call: Call) -> None:
    await call.refuse(429, "too many", kind="rate_limit_error", code="too_many_requests")


async def declines(call: Call) -> None:
    await call.accept()
    await has_no_room_for_arrivals(call)


async def dies(call: Call) -> None:
    await call.accept()
    await loses_its_engine(call)


async def breaks_off(call: Call) -> None:
    await call.accept()
    await breaks(call)


async def misses_its_peer(call: Call) -> None:
    await call.accept()
    await loses_its_peer(call)


LEAVES: dict[str, tuple[Script, str]] = {
    "refuses": (refuses, "refused"),
    "is too busy": (is_too_busy, "refused"),
    "has no room": (declines, "out_of_room"),
    "dies": (dies, "refused"),
    "breaks": (breaks_off, "broken"),
}


class Fleet:
    """One prompt engine and two completion engines, the first of which gets the request."""

    def __init__(self, first: Script, *, has_link: bool = False) -> None:
        self.scripts = Generating()
        self.prompt = MockEngine("prompt", self.scripts.prompt)
        self.first = MockEngine("completion", first, has_link=has_link)
        self.second = MockEngine("completion", self.scripts.completion, has_link=has_link)

    @property
    def engines(self) -> tuple[MockEngine, ...]:
        return self.prompt, self.first, self.second


@pytest.mark.parametrize("has_link", [False, True])
@pytest.mark.parametrize("name", LEAVES)
async def test_a_handover_that_is_left_is_taken_by_another_completion_engine(
    name: str, has_link: bool
) -> None:
    script, reason = LEAVES[name]
    fleet = Fleet(script, has_link=has_link)
    async with stack(*fleet.engines, completion_policy="round_robin", max_migrations=5) as running:
        response = await running.complete()
        assert (response.status_code, response.json()["choices"][0]["text"]) == (200, TEXT)
        assert response.headers["x-tandem-migrations"] == "1"
        assert running.metric("tandem_proxy_migrations_total", reason=reason, stage="handover") == 1
        taken = [engine.calls[0].completion_request for engine in (fleet.first, fleet.second)]
        (computed,) = (call.prompt_request for call in fleet.prompt.calls)
        assert {request.handover_id for request in taken} == {computed.handover_id}
        assert fleet.prompt.withdrawn == []


@pytest.mark.parametrize("has_link", [False, True])
async def test_a_handover_that_a_silent_engine_does_not_take_is_taken_by_another(has_link: bool) -> None:
    async def says_nothing(call: Call) -> None:
        await call.accept()
        await call.client_left.wait()

    fleet = Fleet(says_nothing, has_link=has_link)
    patience = {"first_byte_timeout_s": 3.0}
    async with stack(
        *fleet.engines, completion_policy="round_robin", max_migrations=5, **patience
    ) as running:
        response = await running.complete()
        assert (response.status_code, response.json()["choices"][0]["text"]) == (200, TEXT)
        assert running.metric("tandem_proxy_migrations_total", reason="timeout", stage="handover") == 1
        assert fleet.first.calls[0].client_left.is_set()
        assert len(fleet.prompt.calls) == 1
        assert fleet.prompt.withdrawn == []


async def test_a_prompt_that_is_still_computed_when_its_first_taker_declines_is_computed_once() -> None:
    fleet = Fleet(declines)
    is_declined = asyncio.Event()

    async def computes_until_declined(call: Call) -> None:
        await is_declined.wait()
        await fleet.scripts.prompt(call)

    async def waits_for_its_prompt(call: Call) -> None:
        is_declined.set()
        await fleet.scripts.completion(call)

    fleet.prompt.script, fleet.second.script = computes_until_declined, waits_for_its_prompt
    async with stack(*fleet.engines, completion_policy="round_robin", max_migrations=5) as running:
        response = await running.complete()
    assert response.json()["choices"][0]["text"] == TEXT
    assert len(fleet.prompt.calls) == 1


async def test_a_handover_nobody_else_can_take_fails_as_before() -> None:
    fleet = Fleet(declines)
    async with stack(fleet.prompt, fleet.first, max_migrations=0) as running:
        response = await running.complete()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "handover_no_room")
        await until(lambda: bool(fleet.prompt.withdrawn))
        assert fleet.prompt.withdrawn == [fleet.prompt.calls[0].prompt_request.handover_id]


async def test_a_prompt_whose_blocks_were_taken_back_is_computed_once_more_by_the_only_pair() -> None:
    """Nothing is wrong with either engine."""
    scripts = Generating()

    async def is_superseded_once(call: Call) -> None:
        if len(completion.calls) > 1:
            await scripts.completion(call)
            return
        await call.accept()
        error = ServiceError(message="computed again", type="server_error", code="handover_superseded")
        await call.event(CompletionEvent(error=error, error_status=503))
        await call.end()

    prompt, completion = MockEngine("prompt", scripts.prompt), MockEngine("completion", is_superseded_once)
    async with stack(prompt, completion, max_migrations=5) as running:
        response = await running.complete()
    assert (response.status_code, response.json()["choices"][0]["text"]) == (200, TEXT)
    assert response.headers["x-tandem-migrations"] == "1"


async def test_a_handover_that_broke_is_not_passed_on_but_computed_anew() -> None:
    """Its prompt engine may be the one at fault."""
    fleet = Fleet(misses_its_peer)
    another = MockEngine("prompt", fleet.scripts.prompt)
    async with stack(*fleet.engines, another, completion_policy="round_robin", max_migrations=5) as running:
        response = await running.complete()
        assert response.json()["choices"][0]["text"] == TEXT
        assert running.metric("tandem_proxy_migrations_total", reason="handover", stage="handover") == 0
    names = [call.prompt_request.handover_id for engine in (fleet.prompt, another) for call in engine.calls]
    assert len(set(names)) == 2
