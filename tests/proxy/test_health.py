"""Who gets requests: not who fails them, who drains, or who has no partner."""

import asyncio
from types import SimpleNamespace

import pytest

from proxy.breaker import FIRST_PAUSE_S, MAX_FAILURES
from tests.proxy.builders import Answering, Stack, stack, until
from tests.proxy.mock_engines import Call, MockEngine, Script
from wire.services import CompletionEvent, ServiceError


async def fails(call: Call) -> None:
    await call.refuse(500, "broken inside")


async def test_an_engine_that_fails_everything_is_ejected_and_comes_back_after_one_good_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("proxy.engines.time", SimpleNamespace(monotonic=lambda: now_s))
    answering = Answering("ok")
    bad, good = MockEngine("prompt", fails), MockEngine("prompt", answering.prompt)
    async with stack(bad, good, MockEngine("completion", answering.completion)) as running:
        statuses = [(await running.complete()).status_code for _ in range(4 * MAX_FAILURES)]
        assert statuses.count(500) == len(bad.calls) == MAX_FAILURES
        assert running.metric("tandem_proxy_ejections_total", role="prompt") == 1
        assert "failed 5 requests in a row" in (await running.client.get("/health")).text
        bad.script = answering.prompt
        now_s += FIRST_PAUSE_S
        statuses = [(await running.complete()).status_code for _ in range(4)]
        assert statuses == [200] * 4
        assert len(bad.calls) > MAX_FAILURES


@pytest.mark.parametrize("has_link", [False, True])
async def test_an_engine_that_accepts_everything_and_then_fails_it_is_ejected_and_tried_again(
    has_link: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("proxy.engines.time", SimpleNamespace(monotonic=lambda: now_s))
    answering = Answering("ok")

    async def fails_later(call: Call) -> None:
        await call.accept()
        error = ServiceError(message="broken inside", type="server_error")
        await call.event(CompletionEvent(error=error, error_status=500))
        await call.end()

    bad, good = (
        MockEngine("normal", script, has_link=has_link) for script in (fails_later, answering.normal)
    )
    async with stack(bad, good, normal_policy="round_robin") as running:
        statuses = [(await running.complete()).status_code for _ in range(4 * MAX_FAILURES)]
        assert statuses.count(500) == len(bad.calls) == MAX_FAILURES
        bad.script = answering.normal
        now_s += FIRST_PAUSE_S
        assert [(await running.complete()).status_code for _ in range(4)] == [200] * 4
        assert len(bad.calls) > MAX_FAILURES


async def test_one_prompt_of_a_list_tries_an_ejected_engine_out_and_the_others_go_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("proxy.engines.time", SimpleNamespace(monotonic=lambda: now_s))
    answering = Answering("ok")
    bad, good = MockEngine("prompt", fails), MockEngine("prompt", answering.prompt)
    engines = (bad, good, MockEngine("completion", answering.completion))
    async with stack(*engines, prompt_policy="round_robin") as running:
        for _ in range(2 * MAX_FAILURES):
            await running.complete()
        assert len(bad.calls) == MAX_FAILURES
        bad.script = answering.prompt
        now_s += FIRST_PAUSE_S
        assert (await running.complete(prompt=["a", "b", "c", "d", "e"])).status_code == 200
        assert len(bad.calls) == MAX_FAILURES + 1


async def test_running_out_of_room_ejects_nobody() -> None:
    async def full(call: Call) -> None:
        await call.accept()
        await call.tokens(1, [1], finish_reason="insufficient_system_resource")
        await call.end()

    await ejects_nobody(full)


async def test_having_no_room_for_an_arrival_ejects_nobody() -> None:
    async def full(call: Call) -> None:
        await call.accept()
        error = ServiceError(message="full", type="server_error", code="handover_no_room")
        await call.event(CompletionEvent(error=error, error_status=503))
        await call.end()

    await ejects_nobody(full)


async def ejects_nobody(full: Script) -> None:

    answering = Answering("ab")
    async with stack(MockEngine("prompt", answering.prompt), MockEngine("completion", full)) as running:
        for _ in range(2 * MAX_FAILURES):
            assert (await running.complete()).status_code == 503
        assert all(engine.is_routable for engine in running.services.routes.snapshot().engines)


async def test_a_draining_engine_finishes_its_stream_and_gets_nothing_new() -> None:
    may_end = asyncio.Event()

    async def slowly(call: Call) -> None:
        await call.accept()
        await call.tokens(1, answering.ids[1:2])
        await may_end.wait()
        await call.tokens(2, answering.ids[2:], finish_reason="stop")
        await call.end()

    answering = Answering("ab")
    draining, other = MockEngine("completion", slowly), MockEngine("completion", answering.completion)
    async with stack(MockEngine("prompt", answering.prompt), draining, other, refresh_s=0.02) as running:
        first = asyncio.create_task(running.complete())
        await until(lambda: len(draining.calls) + len(other.calls) == 1)
        if other.calls:
            await first
            first = asyncio.create_task(running.complete())
        await draining.call()
        draining.is_ready = False
        await _until_not_ready(running, 1)
        for _ in range(4):
            assert (await running.complete()).status_code == 200
        may_end.set()
        assert (await first).json()["choices"][0]["text"] == "ab"
        assert len(draining.calls) == 1
        assert "draining" in (await running.client.get("/health")).text


async def test_no_leg_is_sent_where_the_other_role_has_nobody() -> None:
    answering = Answering("ab")
    prompt, completion = MockEngine("prompt", answering.prompt), MockEngine("completion", fails)
    async with stack(prompt, completion, refresh_s=0.02) as running:
        completion.is_ready = False
        await _until_not_ready(running, 1)
        response = await running.complete()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_engine_available")
        assert not prompt.calls
        assert not completion.calls


async def _until_not_ready(running: Stack, position: int) -> None:
    async with asyncio.timeout(5):
        while running.services.directory.snapshot().engines[position].is_ready:
            await running.services.directory.wait_for_change()


async def test_a_proxy_that_has_stopped_looking_after_its_engines_is_not_alive() -> None:
    async with stack() as running:
        assert (await running.client.get("/health/live")).json() == {"status": "alive"}
        (directory,) = [task for task in running.services.vital if "Directory" in task.get_name()]
        directory.cancel()
        await until(directory.done)
        dead = await running.client.get("/health/live")
    assert dead.status_code == 503
    assert dead.json()["status"].startswith("EngineDirectory ended")
