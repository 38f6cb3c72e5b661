"""`n` choices of a prompt: one call to each engine, every choice a stream of its own."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.proxy.builders import END_ID, Stack, events, ids, pair_stack, stack, until
from tests.proxy.mock_engines import Call, MockEngine, Script, token
from tests.proxy.test_cancellation import RawClient
from wire.services import FinishReason, PromptChoice

BOTH_WAYS = pytest.mark.parametrize("is_streamed", [False, True])


def starting(*texts: str, num_cached_tokens: int = 0) -> Script:
    """A prompt engine whose choices begin with these characters; "$" ends its choice at once."""

    async def prompt(call: Call) -> None:
        choices = [first_choice(text) for text in texts]
        await call.first_tokens(*choices, num_cached_tokens=num_cached_tokens)

    return prompt


def first_choice(text: str) -> PromptChoice:
    reason: FinishReason | None = "stop" if text == "$" else None
    return PromptChoice(token=token(0, END_ID if reason else ids(text)[0]), finish_reason=reason)


def going_on(*parts: tuple[int, int, str], first_index: int = 1) -> Script:
    """A completion engine that sends (choice, index, text); "$" ends the choice."""

    async def completion(call: Call) -> None:
        await call.accept()
        for choice, index, text in parts:
            is_end = text.endswith("$")
            token_ids = ids(text.removesuffix("$"))
            reason = "length" if is_end else None
            await call.tokens(index, token_ids, choice=choice, finish_reason=reason)
        await call.end()

    return completion


THREE = going_on((0, 1, "b"), (1, 1, "2"), (2, 1, "y$"), (0, 2, "c"), (1, 2, "3$"), (0, 3, "d$"))
TEXTS = ["abcd", "123", "xy"]


async def texts_and_reasons(
    running: Stack, *, is_streamed: bool, **fields: object
) -> tuple[list[str], list[str | None], dict[str, Any]]:
    """Text and finish reason of every choice in order of index, and the usage."""
    if not is_streamed:
        answer = (await running.complete(**fields)).json()
        choices = answer["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(choices)))
        return [c["text"] for c in choices], [c["finish_reason"] for c in choices], answer["usage"]
    response = await running.complete(stream=True, stream_options={"include_usage": True}, **fields)
    *chunks, last, done = events(response.text)
    assert done == "[DONE]"
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    for chunk in chunks:
        (choice,) = json.loads(chunk)["choices"]
        index = choice["index"]
        assert reasons.get(index) is None, "a chunk after the finish reason"
        texts[index] = texts.get(index, "") + choice["text"]
        reasons[index] = choice["finish_reason"]
    usage: dict[str, Any] = json.loads(last)["usage"]
    return [texts[i] for i in sorted(texts)], [reasons[i] for i in sorted(reasons)], usage


@BOTH_WAYS
async def test_one_call_to_each_engine_serves_every_choice(is_streamed: bool) -> None:
    async with pair_stack(starting("a", "1", "x", num_cached_tokens=1), THREE) as running:
        texts, reasons, usage = await texts_and_reasons(running, is_streamed=is_streamed, n=3)
        assert [len(engine.calls) for engine in running.engines] == [1, 1]
    assert (texts, reasons) == (TEXTS, ["length"] * 3)
    assert usage == {
        "prompt_tokens": 2,
        "completion_tokens": 9,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    prompt, completion = (engine.calls[0] for engine in running.engines)
    assert prompt.prompt_request.num_completions == completion.completion_request.num_completions == 3
    assert running.engines[0].withdrawn == []


async def test_chat_streams_name_the_role_once_for_every_choice() -> None:
    async with pair_stack(starting("a", "1", "x"), THREE) as running:
        *chunks, _ = events((await running.chat(n=3, stream=True)).text)
        whole = (await running.chat(n=3)).json()
    by_choice: dict[int, list[dict[str, Any]]] = {0: [], 1: [], 2: []}
    for chunk in chunks:
        (choice,) = json.loads(chunk)["choices"]
        by_choice[choice["index"]].append(choice)
    for index, choices in by_choice.items():
        assert "".join(choice["delta"].get("content", "") for choice in choices) == TEXTS[index]
        roles = [choice["delta"].get("role") for choice in choices]
        assert roles == ["assistant"] + [None] * (len(roles) - 1)
    assert [choice["message"]["content"] for choice in whole["choices"]] == TEXTS


@BOTH_WAYS
async def test_a_normal_engine_serves_every_choice_with_one_call(is_streamed: bool) -> None:
    script = going_on((0, 0, "a"), (1, 0, "1$"), (0, 1, "b$"))
    async with stack(MockEngine("normal", script)) as running:
        texts, reasons, usage = await texts_and_reasons(running, is_streamed=is_streamed, n=2)
        assert len(running.engines[0].calls) == 1
    assert (texts, reasons) == (["ab", "1"], ["length", "length"])
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 3)
    assert running.engines[0].calls[0].completion_request.num_completions == 2


@BOTH_WAYS
async def test_choices_that_end_with_their_first_token_leave_the_others_alone(is_streamed: bool) -> None:
    async with pair_stack(starting("$", "1", "$"), going_on((1, 1, "2"), (1, 2, "3$"))) as running:
        texts, reasons, usage = await texts_and_reasons(running, is_streamed=is_streamed, n=3)
    assert (texts, reasons) == (["", "123", ""], ["stop", "length", "stop"])
    assert usage["completion_tokens"] == 5


async def test_when_all_choices_end_with_their_first_token_the_completion_leg_is_cancelled() -> None:
    async def completion(call: Call) -> None:
        await asyncio.Event().wait()

    async with pair_stack(starting("$", "$"), completion, has_link=False) as running:
        answer = (await running.complete(n=2)).json()
        async with asyncio.timeout(4):
            await (await running.engines[1].call()).client_left.wait()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "stop"]
    assert running.engines[0].withdrawn == [], "a prompt that has ended holds nothing"


@BOTH_WAYS
async def test_a_stop_string_ends_its_choice_alone(is_streamed: bool) -> None:
    """What the engine generates for that choice from then on is dropped, its own end included."""
    parts = [(0, 1, "b"), (1, 1, "b"), (0, 2, "cde"), (1, 2, "z"), (0, 5, "f$"), (1, 3, "w$")]
    async with pair_stack(starting("a", "x"), going_on(*parts)) as running:
        texts, reasons, _ = await texts_and_reasons(running, is_streamed=is_streamed, n=2, stop=["abc"])
    assert (texts, reasons) == (["", "xbzw"], ["stop", "length"])


async def test_the_stream_is_left_when_stop_strings_have_ended_every_choice() -> None:
    async def completion(call: Call) -> None:
        await call.accept()
        await call.tokens(1, ids("b"), choice=0)
        await call.tokens(1, ids("b"), choice=1)
        await asyncio.Event().wait()

    async with pair_stack(starting("a", "a"), completion) as running:
        answer = (await running.complete(n=2, stop=["b"])).json()
        async with asyncio.timeout(4):
            await running.engines[1].calls[0].client_left.wait()
    assert [choice["text"] for choice in answer["choices"]] == ["a", "a"]


@BOTH_WAYS
async def test_lists_of_prompts_and_n_multiply_prompt_by_prompt(is_streamed: bool) -> None:
    """P1: every choice of every prompt comes back."""

    async def prompt(call: Call) -> None:
        last = call.prompt_request.prompt_token_ids[-1]
        await call.first_tokens(PromptChoice(token=token(0, last)), PromptChoice(token=token(0, last)))

    async def completion(call: Call) -> None:
        await going_on((1, 1, "1$"), (0, 1, "0$"))(call)

    async with pair_stack(prompt, completion) as running:
        texts, _, usage = await texts_and_reasons(
            running, is_streamed=is_streamed, prompt=["xa", "xb", "xc"], n=2
        )
        assert [len(engine.calls) for engine in running.engines] == [3, 3]
    assert texts == ["a0", "a1", "b0", "b1", "c0", "c1"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 12)


@BOTH_WAYS
@pytest.mark.parametrize("reason", ["insufficient_system_resource", "abort"])
async def test_a_choice_that_fails_fails_the_request(reason: FinishReason, is_streamed: bool) -> None:
    async def completion(call: Call) -> None:
        await call.accept()
        await call.tokens(1, ids("b"), choice=0, finish_reason="length")
        await call.tokens(1, ids("2"), choice=1, finish_reason=reason)
        await call.end()

    async with pair_stack(starting("a", "1"), completion) as running:
        response = await running.complete(n=2, stream=is_streamed)
    if is_streamed:
        *_, error, done = events(response.text)
        assert (json.loads(error)["error"]["code"], done) == (reason, "[DONE]")
    else:
        assert (response.status_code, response.json()["error"]["code"]) == (503, reason)


@pytest.mark.parametrize(
    "parts",
    [
        [(2, 1, "b")],  # nobody asked for a third
        [(-1, 1, "b")],
        [(0, 1, "b$"), (0, 2, "c")],  # after its end
        [(0, 1, "b$")],  # the stream ends without the other
        [(0, 1, "b$"), (1, 2, "c$")],  # a token is missing
    ],
)
async def test_a_stream_that_is_not_that_of_its_choices_is_502(parts: Sequence[tuple[int, int, str]]) -> None:
    async with pair_stack(starting("a", "1"), going_on(*parts)) as running:
        response = await running.complete(n=2)
    assert (response.status_code, response.json()["error"]["code"]) == (502, "engine_failed")


@pytest.mark.parametrize("texts", [(), ("a",), ("a", "b", "c")])
async def test_a_prompt_engine_that_answers_another_number_of_choices_is_502(texts: tuple[str, ...]) -> None:
    async with pair_stack(starting(*texts), going_on((0, 1, "b$"))) as running:
        response = await running.complete(n=2)
    assert (response.status_code, response.json()["error"]["code"]) == (502, "engine_failed")


# ----- hand-overs that nobody takes


async def silent(call: Call) -> None:
    await asyncio.Event().wait()


async def accepted_then_silent(call: Call) -> None:
    await call.accept()
    await silent(call)


async def refused_late(call: Call) -> None:
    """A refusal that comes when token 0 has long been there."""
    await asyncio.sleep(0.1)
    await call.refuse(429, "full", kind="rate_limit_error")


async def withdrawn(running: Stack) -> None:
    """Within a second of now the prompt engine has been told, once, and of the right hand-over."""
    async with asyncio.timeout(4):
        await until(lambda: bool(running.engines[0].withdrawn))
    call = running.engines[0].calls[0]
    assert running.engines[0].withdrawn == [call.prompt_request.handover_id]


@BOTH_WAYS
@pytest.mark.parametrize("n", [1, 2])
async def test_a_completion_engine_that_refuses_after_the_first_token_withdraws_the_handover(
    is_streamed: bool, n: int
) -> None:
    """T1"""
    async with pair_stack(starting(*"ab"[:n]), refused_late) as running:
        await running.complete(stream=is_streamed, n=n)
        await withdrawn(running)


async def test_a_client_that_leaves_between_the_legs_withdraws_the_handover() -> None:
    """T3"""
    async with pair_stack(starting("a"), accepted_then_silent) as running:
        client = await RawClient.connect(running)
        client.post(stream=True)
        await client.read_until(b'"text":"a"')
        await client.leave()
        await withdrawn(running)


async def test_a_client_that_leaves_in_prefill_withdraws_the_handover_too() -> None:
    """The prompt engine may just have answered."""
    async with pair_stack(silent, accepted_then_silent) as running:
        client = await RawClient.connect(running)
        client.post()
        await running.engines[0].call()
        await client.leave()
        await withdrawn(running)


async def test_a_stop_string_in_the_first_token_withdraws_the_handover() -> None:
    async with pair_stack(starting("a"), accepted_then_silent) as running:
        assert (await running.complete(stop=["a"])).json()["choices"][0]["finish_reason"] == "stop"
        await withdrawn(running)


async def test_a_handover_that_was_taken_over_or_never_made_is_not_withdrawn() -> None:
    async def refuse(call: Call) -> None:
        await call.refuse(429, "full")

    async def fails_later(call: Call) -> None:
        await call.accept()
        await call.tokens(1, ids("b"))
        raise ConnectionAbortedError

    for scripts in (
        (starting("a"), going_on((0, 1, "b$"))),
        (starting("a"), fails_later),
        (refuse, accepted_then_silent),
    ):
        async with pair_stack(*scripts) as running:
            await running.complete()
            await running.services.calls.close()
            assert running.engines[0].withdrawn == []


async def test_a_prompt_engine_that_is_slow_to_withdraw_holds_no_client_up() -> None:
    class Deaf(MockEngine):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http" and scope["method"] == "DELETE":
                while (await receive())["type"] != "http.disconnect":
                    pass
                return
            await super().__call__(scope, receive, send)

    engines = Deaf("prompt", starting("a")), MockEngine("completion", refused_late)
    async with stack(*engines) as running:
        assert (await running.complete()).status_code == 429
        assert running.services.calls._withdrawals, "still being asked"
