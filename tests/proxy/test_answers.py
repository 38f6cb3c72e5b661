"""What a client gets when all goes well."""

import asyncio
import json
from typing import Any

import pytest

from tests.proxy.builders import END_ID, Answering, Stack, events, ids, pair_stack, stack
from tests.proxy.mock_engines import Call, MockEngine
from wire.services import CompletionEvent, FinishReason, OutputToken, TokenLogprobs

TEXT = "Grüße 🙂 שלום"


async def streamed_chunks(running: Stack, path: str, **fields: object) -> list[dict[str, Any]]:
    """The chunks of a stream that ended normally."""
    send = running.chat if path == "chat" else running.complete
    response = await send(stream=True, **fields)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream"
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def text_of(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices
    )


@pytest.mark.parametrize("path", ["chat", "text"])
async def test_streamed_text_equals_the_whole_text(path: str) -> None:
    answering = Answering(TEXT, finish_reason="length")
    async with pair_stack(answering.prompt, answering.completion) as running:
        whole = await (running.chat() if path == "chat" else running.complete())
        choice = whole.json()["choices"][0]
        chunks = await streamed_chunks(running, path)
    assert text_of(chunks) == (choice["message"]["content"] if path == "chat" else choice["text"]) == TEXT
    assert choice["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_every_chat_chunk_is_what_sdks_require() -> None:
    answering = Answering("abc")
    async with pair_stack(answering.prompt, answering.completion) as running:
        chunks = await streamed_chunks(running, "chat")
    assert len({(chunk["id"], chunk["model"], chunk["created"]) for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert len(choices) == len(chunks)
    assert all(choice["index"] == 0 and isinstance(choice["delta"], dict) for choice in choices)
    assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("path", ["chat", "text"])
async def test_usage_chunk_comes_once_and_last_with_the_prompt_engines_cached_tokens(path: str) -> None:
    """P6."""
    answering = Answering("abc", num_cached_tokens=2)
    async with pair_stack(answering.prompt, answering.completion) as running:
        chunks = await streamed_chunks(running, path, stream_options={"include_usage": True})
        whole = (await (running.chat() if path == "chat" else running.complete())).json()
    num_prompt_tokens = whole["usage"]["prompt_tokens"]
    assert num_prompt_tokens == (2 if path == "text" else len("<user\nhi><assistant\n"))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"] == {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": 4,
        "total_tokens": num_prompt_tokens + 4,
        "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip
    assert sum("usage" in chunk for chunk in chunks) == 1


async def test_the_first_event_arrives_before_the_second_token_exists() -> None:
    second_token = asyncio.Event()

    async def completion(call: Call) -> None:
        await second_token.wait()
        await call.accept()
        await call.tokens(1, ids("b"), finish_reason="length")
        await call.end()

    async with pair_stack(Answering("a", finish_reason=None).prompt, completion) as running:
        body = {"model": "tiny", "prompt": "hi", "stream": True}
        async with running.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            assert json.loads((await anext(lines)).removeprefix("data: "))["choices"][0]["text"] == "a"
            second_token.set()
            rest = [line async for line in lines if line]
    assert json.loads(rest[0].removeprefix("data: "))["choices"][0]["text"] == "b"


@pytest.mark.parametrize("reason", ["stop", "length"])
async def test_a_first_token_that_ends_the_request_cancels_the_completion_leg(reason: FinishReason) -> None:
    async def prompt(call: Call) -> None:
        await running.engines[1].call()
        await call.first_token(END_ID if reason == "stop" else ids("a")[0], finish_reason=reason)

    async def completion(call: Call) -> None:
        await asyncio.Event().wait()

    async with pair_stack(prompt, completion) as running:
        answer = (await running.chat(max_tokens=1)).json()
        async with asyncio.timeout(4):
            await (await running.engines[1].call()).client_left.wait()
    assert answer["choices"][0]["finish_reason"] == reason
    assert answer["choices"][0]["message"]["content"] == ("" if reason == "stop" else "a")
    assert answer["usage"]["completion_tokens"] == 1


async def test_a_withdrawn_hand_over_is_no_failure_when_the_first_token_ended_the_request() -> None:
    withdrawn = asyncio.Event()

    async def prompt(call: Call) -> None:
        await withdrawn.wait()
        await call.first_token(ids("a")[0], finish_reason="length")

    async def completion(call: Call) -> None:
        await call.accept()
        await call.event(CompletionEvent(finish_reason="handover_withdrawn"))
        withdrawn.set()
        await call.end()

    async with pair_stack(prompt, completion) as running:
        answer = (await running.complete(max_tokens=1)).json()
    assert answer["choices"][0] == {"index": 0, "text": "a", "logprobs": None, "finish_reason": "length"}


async def test_a_stop_string_across_the_hand_over_ends_both_legs() -> None:
    async def completion(call: Call) -> None:
        await call.accept()
        await call.tokens(1, ids("b"))
        await asyncio.Event().wait()

    async with pair_stack(Answering("a", finish_reason=None).prompt, completion) as running:
        answer = (await running.complete(stop=["ab"])).json()
        async with asyncio.timeout(4):
            await running.engines[1].calls[0].client_left.wait()
    assert answer["choices"][0]["text"] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 2


async def test_a_normal_engine_serves_alone() -> None:
    """P5: and the answer says so."""
    answering = Answering(TEXT, num_cached_tokens=1)
    async with stack(MockEngine("normal", answering.normal)) as running:
        response = await running.complete()
        assert running.metric("tandem_proxy_routes_total", kind="normal") == 1
    answer = response.json()
    assert response.headers["x-tandem-route"] == "normal"
    request = running.engines[0].calls[0].completion_request
    assert (request.handover_id, request.prompt_engine) == (None, None)
    assert answer["choices"][0]["text"] == TEXT
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1


async def test_both_legs_get_the_same_request_and_the_completion_leg_the_prompt_engines_address() -> None:
    answering = Answering("ab")
    async with pair_stack(answering.prompt, answering.completion) as running:
        await running.complete(temperature=0.5, top_p=0.9, top_k=7, stop_token_ids=[3], ignore_eos=True)
    prompt, completion = running.engines
    left, right = prompt.calls[0].prompt_request, completion.calls[0].completion_request
    assert left.sampling == right.sampling
    assert left.prompt_token_ids == right.prompt_token_ids == tuple(ids("hi"))
    assert (left.request_id, left.handover_id) == (right.request_id, right.handover_id)
    assert right.prompt_engine is not None
    assert right.prompt_engine.control_address == prompt.info.control_address
    assert right.prompt_engine.epoch == prompt.info.epoch
    sampling = left.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ((3,), True)


async def test_a_missing_seed_is_drawn_and_a_negative_one_is_folded() -> None:
    answering = Answering("a")
    async with pair_stack(answering.prompt, answering.completion) as running:
        for seed in (None, None, 5, -1):
            await running.complete(seed=seed)
    first, second, third, fourth = (call.prompt_request.sampling.seed for call in running.engines[0].calls)
    assert first != second
    assert (third, fourth) == (5, 2**63 - 1)


async def test_extreme_sampling_parameters_reach_no_engine() -> None:
    answering = Answering("a")
    async with pair_stack(answering.prompt, answering.completion) as running:
        await running.complete(top_k=10**18, temperature=1e-300)
        await running.complete(top_k=-1)
    first, second = (call.prompt_request.sampling for call in running.engines[0].calls)
    assert (first.top_k, first.temperature) == (running.services.text.vocab_size, 0.0)
    assert (second.top_k, second.temperature) == (0, 1.0)


async def test_without_max_tokens_all_that_is_left_of_the_pair_is_allowed() -> None:
    answering = Answering("a")
    prompt, completion = (
        MockEngine("prompt", answering.prompt),
        MockEngine("completion", answering.completion),
    )
    async with stack(prompt, completion) as running:
        await running.complete()
        await running.complete(max_tokens=7)
        await running.chat(max_completion_tokens=9)
    allowed = [call.prompt_request.sampling.max_tokens for call in prompt.calls]
    assert allowed == [prompt.info.max_model_len - 2, 7, 9]


async def test_lists_of_prompts_give_a_choice_each() -> None:
    async def prompt(call: Call) -> None:
        await call.first_token(call.prompt_request.prompt_token_ids[-1])

    async def completion(call: Call) -> None:
        await call.accept()
        await call.tokens(1, ids("!"), finish_reason="length")
        await call.end()

    async with pair_stack(prompt, completion) as running:
        texts = (await running.complete(prompt=["xa", "xb"])).json()
        token_lists = (await running.complete(prompt=[ids("xc"), ids("xd")])).json()
        one_list = (await running.complete(prompt=ids("xe"))).json()
        chunks = await streamed_chunks(
            running, "text", prompt=["xa", "xb"], stream_options={"include_usage": True}
        )
    assert [choice["text"] for choice in texts["choices"]] == ["a!", "b!"]
    assert [choice["text"] for choice in token_lists["choices"]] == ["c!", "d!"]
    assert [choice["text"] for choice in one_list["choices"]] == ["e!"]
    assert texts["usage"]["prompt_tokens"] == 4
    by_index = ["", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            by_index[choice["index"]] += choice["text"]
    assert by_index == ["a!", "b!"]
    assert chunks[-1]["usage"] == texts["usage"]
    handovers = {call.prompt_request.handover_id for call in running.engines[0].calls}
    assert len(handovers) == len(running.engines[0].calls)


def with_logprobs(index: int, char: str) -> OutputToken:
    (token_id,), (other_id,) = ids(char), ids("z")
    logprobs = TokenLogprobs(logprob=-0.5, top_token_ids=(token_id, other_id), top_logprobs=(-0.5, -2.0))
    return OutputToken(index=index, token_id=token_id, logprobs=logprobs)


async def logprobs_prompt(call: Call) -> None:
    first = with_logprobs(0, "a")
    await call.first_token(first.token_id, logprobs=first.logprobs)


async def logprobs_completion(call: Call) -> None:
    await call.accept()
    await call.event(CompletionEvent(tokens=(with_logprobs(1, "b"),), finish_reason="length"))
    await call.end()


async def test_chat_logprobs_have_openais_shape_streamed_and_not() -> None:
    async with pair_stack(logprobs_prompt, logprobs_completion) as running:
        whole = (await running.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]
        chunks = await streamed_chunks(running, "chat", logprobs=True, top_logprobs=2)
    top_z = {"token": "z", "logprob": -2.0, "bytes": [122]}
    a = {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert whole["content"][0] == {**a, "top_logprobs": [a, top_z]}
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == whole["content"]
    assert running.engines[0].calls[0].prompt_request.sampling.logprobs == 2


async def test_text_logprobs_have_openais_shape() -> None:
    async with pair_stack(logprobs_prompt, logprobs_completion) as running:
        logprobs = (await running.complete(logprobs=2)).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "z": -2.0}, {"b": -0.5, "z": -2.0}],
        "text_offset": [0, 1],
    }


async def test_top_logprobs_is_a_list_where_none_were_asked_for() -> None:
    async with pair_stack(logprobs_prompt, logprobs_completion) as running:
        await running.chat(logprobs=True)
    assert running.engines[0].calls[0].prompt_request.sampling.logprobs == 0


async def test_tokens_that_arrive_twice_are_passed_on_once() -> None:
    async def completion(call: Call) -> None:
        await call.accept()
        await call.tokens(0, ids("ab"))
        await call.tokens(1, ids("bc"), finish_reason="length")
        await call.end()

    async with pair_stack(Answering("a", finish_reason=None).prompt, completion) as running:
        answer = (await running.complete()).json()
    assert answer["choices"][0]["text"] == "abc"
    assert answer["usage"]["completion_tokens"] == 3


async def test_request_ids_are_taken_from_the_client_or_made() -> None:
    answering = Answering("a")
    async with pair_stack(answering.prompt, answering.completion) as running:
        url, body = "/v1/completions", {"model": "tiny", "prompt": "hi"}
        given = await running.client.post(url, json=body, headers={"x-request-id": "mine-1"})
        strange = await running.client.post(url, json=body, headers={"x-request-id": "a b\tc"})
        refused = await running.client.post(url, json={}, headers={"x-request-id": "mine-2"})
    assert given.headers["x-request-id"] == "mine-1"
    assert strange.headers["x-request-id"] in strange.json()["id"]
    assert refused.headers["x-request-id"] == "mine-2"


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("has_link", [False, True])
async def test_requests_one_after_another_share_their_connections(has_link: bool, is_streamed: bool) -> None:
    """Two hundred of either kind, and each engine sees two connections at most, probes and link included."""
    answering = Answering("abc")
    async with pair_stack(answering.prompt, answering.completion, has_link=has_link) as running:
        for _ in range(200):
            assert (await running.complete(stream=is_streamed)).status_code == 200
        assert [len(engine.calls) for engine in running.engines] == [200, 200]
        assert max(len(engine.connections) for engine in running.engines) <= 2
        running.services.calls.check_invariants()


async def test_what_was_served_is_counted() -> None:
    answering = Answering("abc", num_cached_tokens=1)
    async with pair_stack(answering.prompt, answering.completion) as running:
        await running.complete()
        await running.complete(n=9)
        text = (await running.client.get("/metrics")).text
    for line in (
        'tandem_proxy_requests_total{endpoint="/v1/completions",status="200"} 1.0',
        'tandem_proxy_requests_total{endpoint="/v1/completions",status="400"} 1.0',
        'tandem_proxy_tokens_total{kind="prompt"} 2.0',
        'tandem_proxy_tokens_total{kind="cached"} 1.0',
        'tandem_proxy_tokens_total{kind="completion"} 4.0',
        'tandem_proxy_time_to_first_token_seconds_count{endpoint="/v1/completions"} 1.0',
        'tandem_proxy_ready_engines{role="prompt"} 1.0',
        'tandem_proxy_open_requests{stream="false"} 0.0',
    ):
        assert line in text.splitlines()
