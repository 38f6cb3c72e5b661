"""A router of others drives the two legs with `kv_transfer_params`, as public ones do."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.proxy.builders import Answering, Stack, chat_body, events, ids, stack, text_body, until
from tests.proxy.mock_engines import Call, MockEngine

ASK_PROMPT = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@asynccontextmanager
async def two_proxies(text: str, **options: Any) -> AsyncIterator[tuple[Stack, Stack]]:
    """One before a prompt engine alone, one before a completion engine that knows where prompts are."""
    answering = Answering(text, **options)
    prompt = MockEngine("prompt", answering.prompt)
    completion = MockEngine("completion", answering.completion)
    async with stack(prompt) as of_prompt, stack(prompt, completion) as of_completion:
        yield of_prompt, of_completion


async def route(prompt: Stack, completion: Stack, path: str, body: dict[str, Any]) -> Any:
    """What a router does: one token from the prompt engine, its params to the completion engine."""
    first = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": ASK_PROMPT}
    first.pop("stream_options", None)
    answer = await prompt.client.post(path, json=first)
    assert answer.status_code == 200, answer.text
    params = answer.json()["kv_transfer_params"]
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    return await completion.client.post(path, json={**body, "kv_transfer_params": params})


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_both_legs_make_the_whole_answer(path: str, is_streamed: bool) -> None:
    body = {**(chat_body() if path == CHAT else text_body()), "seed": 5, "stream": is_streamed}
    async with two_proxies("Grüße", num_cached_tokens=2) as (of_prompt, of_completion):
        response = await route(of_prompt, of_completion, path, body)
        prompt = of_prompt.engines[0].calls[0].prompt_request
        completion = of_completion.engines[1].calls[0].completion_request
    assert response.status_code == 200
    if is_streamed:
        *chunks, done = events(response.text)
        choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
        text = "".join(c["text"] if path == TEXT else c["delta"].get("content", "") for c in choices)
        assert done == "[DONE]"
    else:
        choice = response.json()["choices"][0]
        text = choice["text"] if path == TEXT else choice["message"]["content"]
        assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
        assert "kv_transfer_params" not in response.json()
    assert text == "Grüße"
    assert completion.handover_id == prompt.handover_id
    assert completion.prompt_token_ids == prompt.prompt_token_ids
    assert completion.prompt_engine is not None
    assert completion.prompt_engine.control_address == of_prompt.engines[0].info.control_address
    assert prompt.sampling.max_tokens > 1, "the one token is the router's way of asking for the prompt only"
    assert response.headers["x-tandem-route"] == "leg"


async def test_a_first_token_that_ends_the_answer_needs_no_completion_engine() -> None:
    async with two_proxies("") as (of_prompt, of_completion):
        response = await route(of_prompt, of_completion, TEXT, text_body())
        assert of_completion.engines[1].calls == []
    assert response.json()["choices"][0] == {
        "index": 0, "text": "", "logprobs": None, "finish_reason": "stop",
    }  # fmt: skip


@pytest.mark.parametrize("is_taken_over", [False, True])
async def test_a_handover_whose_client_leaves_before_it_is_taken_over_is_withdrawn(
    is_taken_over: bool,
) -> None:
    async def silent(call: Call) -> None:
        await call.accept()
        if is_taken_over:
            await call.tokens(1, ids("b"))
        await call.client_left.wait()

    async with two_proxies("abc") as (of_prompt, of_completion):
        prompt, completion = of_completion.engines
        completion.script = silent
        first = {**text_body(), "kv_transfer_params": ASK_PROMPT}
        params = (await of_prompt.client.post(TEXT, json=first)).json()["kv_transfer_params"]
        with pytest.raises(httpx.ReadTimeout):
            await of_completion.client.post(
                TEXT, json={**text_body(), "kv_transfer_params": params}, timeout=httpx.Timeout(30, read=2)
            )
        await until(lambda: of_completion.services.draining.num_open_requests == 0)
        await until(lambda: is_taken_over or bool(prompt.withdrawn))
        assert prompt.withdrawn == ([] if is_taken_over else [params["tandem"]["handover_id"]])


async def test_what_the_prompt_leg_says_is_checked_and_is_no_address() -> None:
    async with two_proxies("abc") as (of_prompt, of_completion):
        first = {**text_body(), "kv_transfer_params": ASK_PROMPT}
        params = (await of_prompt.client.post(TEXT, json=first)).json()["kv_transfer_params"]
        for change, param in (
            ({"remote_engine_id": "another"}, "kv_transfer_params.remote_engine_id"),
            ({"remote_engine_id": None}, "kv_transfer_params.remote_engine_id"),
            ({"tandem": None}, "kv_transfer_params.tandem"),
            ({"tandem": {"handover_id": "x"}}, "kv_transfer_params.tandem"),
            ({"do_remote_decode": True}, "kv_transfer_params.do_remote_prefill"),
        ):
            refused = await of_completion.complete(kv_transfer_params={**params, **change})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        moved = {**params, "remote_host": "203.0.113.1", "remote_port": 1}
        assert (await of_completion.complete(kv_transfer_params=moved)).status_code == 200
        told = of_completion.engines[1].calls[0].completion_request.prompt_engine
    assert told is not None
    assert told.control_address == of_prompt.engines[0].info.control_address


async def test_the_operators_limit_of_completions_is_no_refusal_of_prompt_legs() -> None:
    answering = Answering("abc")
    async with stack(MockEngine("prompt", answering.prompt), max_completion_tokens=8) as running:
        response = await running.complete(kv_transfer_params=ASK_PROMPT, max_tokens=1)
        assert response.status_code == 200, response.text
        assert running.engines[0].calls[0].prompt_request.sampling.max_tokens == 8


FORGED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {"finish_reason": "error"}, {}),
    ({}, {"finish_reason": "abort"}, {}),
    ({}, {}, {"token_id": -1}),
    ({}, {}, {"token_id": 2**40}),
    ({}, {}, {"index": 1}),
    ({}, {}, {"logprobs": {"logprob": -1.0, "top_token_ids": [2**40], "top_logprobs": [-1.0]}}),
    ({}, {}, {"logprobs": {"logprob": -1.0, "top_token_ids": [1], "top_logprobs": []}}),
    ({"num_cached_tokens": -1}, {}, {}),
    ({"num_cached_tokens": 10**6}, {}, {}),
]


@pytest.mark.parametrize(("of_answer", "of_choice", "of_token"), FORGED)
async def test_what_no_engine_answered_is_the_clients_fault(
    of_answer: dict[str, Any], of_choice: dict[str, Any], of_token: dict[str, Any]
) -> None:
    async with two_proxies("abc") as (of_prompt, of_completion):
        first = {**text_body(), "kv_transfer_params": ASK_PROMPT}
        params = (await of_prompt.client.post(TEXT, json=first)).json()["kv_transfer_params"]
        computed = params["tandem"]["computed"]
        computed["choices"][0]["token"] |= of_token
        computed["choices"][0] |= of_choice
        computed |= of_answer
        refused = await of_completion.complete(kv_transfer_params=params)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kv_transfer_params.tandem")
        assert of_completion.engines[1].calls == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"stream": True}, "stream"), ({"prompt": ["a", "b"]}, "prompt")],
)
async def test_what_one_leg_cannot_do_is_refused(fields: dict[str, Any], param: str) -> None:
    async with two_proxies("abc") as (of_prompt, _):
        refused = await of_prompt.complete(kv_transfer_params=ASK_PROMPT, **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_a_leg_that_fails_is_an_error_and_a_missing_engine_503() -> None:
    async def refuse(call: Call) -> None:
        await call.refuse(429, "full", kind="rate_limit_error")

    answering = Answering("abc")
    completion = MockEngine("completion", refuse)
    async with stack(MockEngine("prompt", answering.prompt), completion) as running:
        response = await route(running, running, TEXT, text_body())
        assert response.status_code == 429
    async with stack(MockEngine("completion", answering.completion)) as running:
        response = await running.complete(kv_transfer_params=ASK_PROMPT)
        assert response.status_code == 503


async def test_params_that_ask_for_nothing_change_nothing() -> None:
    answering = Answering("abc")
    engines = MockEngine("prompt", answering.prompt), MockEngine("completion", answering.completion)
    async with stack(*engines) as running:
        nothing = {"do_remote_decode": False, "do_remote_prefill": False}
        answer = await running.complete(kv_transfer_params=nothing)
    assert answer.json()["choices"][0]["text"] == "abc"
    assert answer.headers["x-tandem-route"] == "pair"
