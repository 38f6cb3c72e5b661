"""A leg fails: the other is cancelled, and the client gets one clear error."""

import asyncio
import contextlib
import json
from typing import Any

import pytest

from tests.proxy.builders import Answering, Stack, events, ids, pair_stack, stack
from tests.proxy.mock_engines import Call, MockEngine, Script, serving
from wire.services import CompletionEvent, FinishReason, OutputToken, PromptChoice, ServiceError

BOTH_WAYS = pytest.mark.parametrize("is_streamed", [False, True])


async def silent(call: Call) -> None:
    await asyncio.Event().wait()


async def accepted_then_silent(call: Call) -> None:
    await call.accept()
    await asyncio.Event().wait()


def first_token(text: str = "a") -> Script:
    return Answering(text, finish_reason=None).prompt


async def expect_refusal(
    running: Stack, status: int, code: str | None, *, is_streamed: bool, **fields: object
) -> dict[str, Any]:
    """The error object of a request answered with `status` and JSON, streamed or not."""
    async with asyncio.timeout(5):
        response = await running.complete(stream=is_streamed, **fields)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == code
    return error


async def expect_cancelled(engine: MockEngine) -> None:
    async with asyncio.timeout(4):
        await (await engine.call()).client_left.wait()


@BOTH_WAYS
@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_the_prompt_engines_refusal_is_the_clients_and_cancels_the_completion_leg(
    status: int, is_streamed: bool
) -> None:
    """P2."""

    async def prompt(call: Call) -> None:
        await running.engines[1].call()
        await call.refuse(status, "no", param="prompt_token_ids", code="why", headers=[("retry-after", "7")])

    async with pair_stack(prompt, accepted_then_silent) as running:
        error = await expect_refusal(running, status, "why", is_streamed=is_streamed)
        await expect_cancelled(running.engines[1])
        response = await running.complete(stream=is_streamed)
    assert (error["message"], error["param"]) == ("no", "prompt")
    assert response.headers["retry-after"] == "7"


@BOTH_WAYS
@pytest.mark.parametrize("status", [400, 429, 503])
async def test_the_completion_engines_refusal_is_the_clients_and_cancels_the_prompt_leg(
    status: int, is_streamed: bool
) -> None:
    async def completion(call: Call) -> None:
        await running.engines[0].call()
        await call.refuse(status, "no", code="why")

    async with pair_stack(silent, completion) as running:
        await expect_refusal(running, status, "why", is_streamed=is_streamed)
        await expect_cancelled(running.engines[0])
        assert running.metric(
            "tandem_proxy_leg_failures_total", role="completion", reason="refused"
        ) == 1  # fmt: skip


@BOTH_WAYS
async def test_a_refusal_that_races_a_fast_first_token_is_still_a_status(
    is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.request_flow.REFUSAL_WINDOW_S", 10.0)  # how fast this machine is is no matter

    async def completion(call: Call) -> None:
        await call.refuse(429, "full", kind="rate_limit_error")

    async with pair_stack(first_token(), completion) as running:
        await expect_refusal(running, 429, None, is_streamed=is_streamed)


async def test_when_both_refuse_the_prompt_engines_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.request_flow.PROMPT_REASON_WAIT_S", 10.0)

    async def prompt(call: Call) -> None:
        await completion_refused.wait()
        await call.refuse(
            400, "prompt too long", kind="invalid_request_error", code="context_length_exceeded"
        )

    async def completion(call: Call) -> None:
        await call.refuse(503, "the peer is lost", code="handover_peer_lost")
        completion_refused.set()

    completion_refused = asyncio.Event()
    async with pair_stack(prompt, completion) as running:
        await expect_refusal(running, 400, "context_length_exceeded", is_streamed=True)


@BOTH_WAYS
async def test_a_failed_hand_over_is_not_the_clients_fault(is_streamed: bool) -> None:
    async def completion(call: Call) -> None:
        await call.refuse(409, "dtype differs", kind="invalid_request_error", code="handover_incompatible")

    async with pair_stack(silent, completion) as running:
        error = await expect_refusal(running, 502, "handover_incompatible", is_streamed=is_streamed)
        assert error["type"] == "server_error"


@pytest.mark.parametrize("role", ["prompt", "completion"])
@BOTH_WAYS
async def test_a_refusal_without_an_error_object_is_a_broken_protocol_or_its_status(
    role: str, is_streamed: bool
) -> None:
    async def answer(call: Call) -> None:
        await call.answer(sent, b"" if sent == 204 else b"<html>")

    scripts = (answer, silent) if role == "prompt" else (silent, answer)
    async with pair_stack(*scripts, has_link=False) as running:
        for sent, told in ((404, 502), (302, 502), (503, 503), (204, 502)):  # noqa: B007 - `answer` sends it
            code = "engine_refused" if told == 503 else "engine_failed"
            await expect_refusal(running, told, code, is_streamed=is_streamed)


async def broken_json(call: Call) -> None:
    await call.answer(200, b'{"request_id": 1}')


async def wrong_index(call: Call) -> None:
    await call.first_tokens(PromptChoice(token=OutputToken(index=1, token_id=1)))


async def cut_short(call: Call) -> None:
    headers = [(b"content-length", b"1000")]
    await call.send({"type": "http.response.start", "status": 200, "headers": headers})
    await call.write(b'{"request_id"')
    raise ConnectionAbortedError


@BOTH_WAYS
@pytest.mark.parametrize("script", [broken_json, wrong_index, cut_short])
async def test_an_answer_outside_the_protocol_is_502(
    script: Script, is_streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair_stack(script, accepted_then_silent, has_link=False) as running:
        await expect_refusal(running, 502, "engine_failed", is_streamed=is_streamed)
        await expect_cancelled(running.engines[1])


async def broken_event(call: Call) -> None:
    await call.accept()
    await call.write(b"data: {nonsense}\n\n")
    await silent(call)


async def ends_at_once(call: Call) -> None:
    await call.accept()
    await call.end()


async def with_a_gap(call: Call) -> None:
    await call.accept()
    await call.tokens(2, ids("c"))
    await silent(call)


async def fails_at_once(call: Call) -> None:
    await call.accept()
    error = ServiceError(message="lost", type="server_error", code="engine_failed")
    await call.event(CompletionEvent(error=error))
    await call.end()


async def endless_event(call: Call) -> None:
    await call.accept()
    await call.write(b"data: " + b"x" * (5 << 20))
    await silent(call)


@pytest.mark.parametrize("script", [broken_event, ends_at_once, with_a_gap, fails_at_once, endless_event])
async def test_a_completion_stream_outside_the_protocol_is_502(script: Script) -> None:
    async with pair_stack(first_token(), script, has_link=False) as running:
        error = await expect_refusal(running, 502, "engine_failed", is_streamed=False)
        assert error["type"] == "server_error"


@BOTH_WAYS
async def test_a_completion_leg_that_fails_before_the_first_token_cancels_the_prompt_leg(
    is_streamed: bool,
) -> None:
    """P4."""
    async with pair_stack(silent, fails_at_once) as running:
        await expect_refusal(running, 502, "engine_failed", is_streamed=is_streamed)
        await expect_cancelled(running.engines[0])


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("insufficient_system_resource", 503),
        ("abort", 503),
        ("error", 502),
        ("prompt_length_exceeded", 400),
    ],
)
async def test_an_engines_abnormal_finish_is_an_error_never_a_finish_reason(
    reason: FinishReason, status: int
) -> None:
    """P3."""

    async def completion(call: Call) -> None:
        await call.accept()
        await call.tokens(1, ids("b"), finish_reason=reason)
        await call.end()

    async with pair_stack(first_token(), completion) as running:
        code = "context_length_exceeded" if status == 400 else reason
        await expect_refusal(running, status, code, is_streamed=False)
        response = await running.complete(stream=True)
        *chunks, error, done = events(response.text)
    assert done == "[DONE]"
    assert json.loads(error)["error"]["code"] == code
    assert [json.loads(chunk)["choices"][0]["finish_reason"] for chunk in chunks] == [None, None]


@BOTH_WAYS
async def test_a_withdrawn_hand_over_without_a_finished_request_is_an_error(is_streamed: bool) -> None:
    async def completion(call: Call) -> None:
        await call.accept()
        await call.event(CompletionEvent(finish_reason="handover_withdrawn"))
        await call.end()

    async with pair_stack(first_token(), completion) as running:
        response = await running.complete(stream=is_streamed)
    assert "handover_withdrawn" in response.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_an_engine_lost_in_mid_stream_is_one_error_frame(path: str) -> None:
    lost = asyncio.Event()

    async def completion(call: Call) -> None:
        await call.accept()
        await call.tokens(1, ids("b"))
        await lost.wait()
        raise ConnectionAbortedError

    async with pair_stack(first_token(), completion) as running:
        body = {
            "model": "tiny",
            "prompt": "x",
            "messages": [{"role": "user", "content": "x"}],
            "stream": True,
        }
        async with running.client.stream("POST", path, json=body) as response:
            received = b""
            async for chunk in response.aiter_bytes():
                received += chunk
                if received.count(b"\n\n") == 2:
                    lost.set()
    assert response.status_code == 200
    *chunks, error, done = events(received.decode())
    assert done == "[DONE]"
    assert set(json.loads(error)["error"]) == {"message", "type", "param", "code"}
    assert json.loads(error)["error"]["code"] == "engine_failed"
    assert all(json.loads(chunk)["choices"][0]["finish_reason"] is None for chunk in chunks)


async def test_a_failure_after_tokens_asks_sdks_not_to_repeat_it() -> None:
    async def fails_later(call: Call) -> None:
        await call.accept()
        await call.tokens(1, ids("b"))
        await call.event(CompletionEvent(error=ServiceError(message="lost", type="server_error")))
        await call.end()

    async with pair_stack(first_token(), fails_later) as running:
        assert (await running.complete()).headers["x-should-retry"] == "false"
    async with pair_stack(silent, fails_at_once) as running:
        assert "x-should-retry" not in (await running.complete()).headers


@BOTH_WAYS
async def test_an_unreachable_engine_is_503_and_takes_no_further_request(is_streamed: bool) -> None:
    prompt, completion = MockEngine("prompt", silent), MockEngine("completion", silent)
    async with contextlib.AsyncExitStack() as until_gone:
        completion.url = await until_gone.enter_async_context(serving(completion))
        async with stack(prompt, completion) as running:
            await until_gone.aclose()
            await expect_refusal(running, 503, "engine_unreachable", is_streamed=is_streamed)
            await expect_cancelled(prompt)
            await expect_refusal(running, 503, "no_engine_available", is_streamed=is_streamed)


@BOTH_WAYS
async def test_an_engine_that_never_answers_is_504(is_streamed: bool) -> None:
    async with pair_stack(silent, accepted_then_silent, first_byte_timeout_s=2.0) as running:
        await expect_refusal(running, 504, "engine_timeout", is_streamed=is_streamed)
        for engine in running.engines:
            await expect_cancelled(engine)


async def test_an_engine_that_falls_silent_is_504() -> None:
    async def completion(call: Call) -> None:
        await call.accept()
        await call.tokens(1, ids("b"))
        await silent(call)

    async with pair_stack(first_token(), completion, stall_timeout_s=0.2) as running:
        await expect_refusal(running, 504, "engine_timeout", is_streamed=False)
        await expect_cancelled(running.engines[1])


async def test_the_completion_engines_time_begins_with_the_first_token() -> None:
    async def prompt(call: Call) -> None:
        await asyncio.sleep(3.2)  # time-outs on real sockets; a machine may pause for a second
        await call.first_token(ids("a")[0])

    async def completion(call: Call) -> None:
        await asyncio.sleep(6.4)
        await Answering("ab", finish_reason="length").completion(call)

    async with pair_stack(prompt, completion, first_byte_timeout_s=6.0) as running:
        assert (await running.complete()).json()["choices"][0]["text"] == "ab"


async def test_a_completion_engine_that_never_takes_over_is_504() -> None:
    async with pair_stack(first_token(), silent, first_byte_timeout_s=2.0) as running:
        await expect_refusal(running, 504, "engine_timeout", is_streamed=False)
        *_, error, done = events((await running.complete(stream=True)).text)
        assert (json.loads(error)["error"]["code"], done) == ("engine_timeout", "[DONE]")


async def test_a_long_stream_outlives_every_time_out() -> None:
    num_tokens = 10

    async def completion(call: Call) -> None:
        await call.accept()
        for index in range(1, num_tokens):
            await asyncio.sleep(0.5)  # the time-outs under test are on real sockets
            await call.tokens(index, ids("b"), finish_reason="length" if index == num_tokens - 1 else None)
        await call.end()

    timeouts = {"first_byte_timeout_s": 4.0, "stall_timeout_s": 4.0}
    async with pair_stack(first_token(), completion, **timeouts) as running:
        assert (await running.complete()).json()["usage"]["completion_tokens"] == num_tokens


async def test_an_engine_that_never_answers_delays_nobody_else() -> None:
    answering = Answering("ok")
    good, bad = MockEngine("prompt", answering.prompt), MockEngine("prompt", silent)
    engines = good, bad, MockEngine("completion", answering.completion)
    async with stack(*engines, prompt_policy="round_robin") as running:
        stuck = [asyncio.create_task(running.complete()) for _ in range(8)]
        await bad.call(3)
        async with asyncio.timeout(4):
            answers = [await task for task in stuck if task in await _done(stuck, 4)]
        assert {answer.status_code for answer in answers} == {200}
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)


async def _done(tasks: list[asyncio.Task[Any]], num: int) -> set[asyncio.Task[Any]]:
    done: set[asyncio.Task[Any]] = set()
    while len(done) < num:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0)
    return done


async def test_one_failed_choice_ends_the_others() -> None:
    async def prompt(call: Call) -> None:
        if call.prompt_request.prompt_token_ids[-1] == ids("b")[0]:
            await running.engines[0].call(1)
            await call.refuse(429, "full")
        else:
            await silent(call)

    async with pair_stack(prompt, silent) as running:
        response = await running.complete(prompt=["a", "b"])
        assert response.status_code == 429
        for call in running.engines[1].calls:
            async with asyncio.timeout(4):
                await call.client_left.wait()


async def test_twenty_refusals_keep_the_engine_in_service() -> None:
    async def prompt(call: Call) -> None:
        await call.refuse(400, "no", kind="invalid_request_error")

    async with pair_stack(prompt, silent) as running:
        statuses = [(await running.complete()).status_code for _ in range(20)]
        assert statuses == [400] * 20
        assert all(engine.is_routable for engine in running.services.directory.snapshot().engines)
