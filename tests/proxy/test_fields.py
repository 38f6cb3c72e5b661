"""What clients ask for reaches the engines, and answers have what was asked for."""

import json
from typing import Any

import pytest

from tests.proxy.builders import Answering, Stack, events, ids, pair_stack
from tests.proxy.mock_engines import Call
from wire.sampling import SamplingParams


async def sampling_of(path: str, **fields: object) -> SamplingParams:
    """What both engines were told, which is the same."""
    answering = Answering("ok")
    async with pair_stack(answering.prompt, answering.completion) as running:
        response = await (running.chat(**fields) if path == "chat" else running.complete(**fields))
        assert response.status_code == 200, response.text
        prompt, completion = (engine.calls[0] for engine in running.engines)
    assert prompt.prompt_request.sampling == completion.completion_request.sampling
    return prompt.prompt_request.sampling


@pytest.mark.parametrize("path", ["chat", "text"])
async def test_every_sampling_field_reaches_both_engines(path: str) -> None:
    given: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 11, "presence_penalty": 0.25,
        "frequency_penalty": -0.5, "repetition_penalty": 1.25, "ignore_eos": True, "min_tokens": 2,
    }  # fmt: skip
    sampling = await sampling_of(
        path, **given, logit_bias={"5": -100, "6": 1.5}, stop_token_ids=[4], max_tokens=9
    )
    assert {name: getattr(sampling, name) for name in given} == given
    assert sampling.logit_bias == ((5, -100.0), (6, 1.5))
    assert (sampling.stop_token_ids, sampling.max_tokens) == ((4,), 9)


async def test_a_field_that_asks_for_nothing_is_the_default() -> None:
    plain = await sampling_of("chat", seed=1)
    same = await sampling_of(
        "chat", seed=1, presence_penalty=0, frequency_penalty=None, repetition_penalty=1, logit_bias={},
        min_tokens=0, min_p=0, response_format={"type": "text"}, best_of=1, store=True, metadata={},
    )  # fmt: skip
    assert same == plain


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            "json_schema",
            SCHEMA,
        ),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"guided_regex": "[ab]+"}, "regex", "[ab]+"),
        ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"]),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_object", None),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", ["a"]),
    ],
)
async def test_the_form_of_an_answer_in_every_spelling(fields: Any, kind: str, value: object) -> None:
    structured = (await sampling_of("chat", **fields)).structured
    assert structured is not None
    is_text = kind in ("regex", "ebnf")
    assert structured.kind == kind
    assert (structured.value if is_text else json.loads(structured.value or "null")) == value


async def test_an_engine_that_cannot_follow_the_form_is_named_in_the_clients_words() -> None:
    async def prompt(call: Call) -> None:
        await call.refuse(400, "bad pattern", kind="invalid_request_error", param="structured")

    async with pair_stack(prompt, Answering("ok").completion) as running:
        response = await running.complete(guided_regex="(")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_regex")


async def chunks_of(running: Stack, **fields: object) -> list[Any]:
    *chunks, done = events((await running.complete(stream=True, **fields)).text)
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


async def test_usage_in_every_chunk_counts_up_to_the_last() -> None:
    answering = Answering("abc", num_cached_tokens=1)
    async with pair_stack(answering.prompt, answering.completion) as running:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await chunks_of(running, stream_options=options)
    counted = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counted == sorted(counted)
    assert (counted[0], counted[-1]) == (1, 4)
    assert chunks[-1]["choices"] == []
    assert all(chunk["usage"]["prompt_tokens"] == 2 for chunk in chunks)


@pytest.mark.parametrize("prompt", ["hü", ids("hü")])
async def test_echo_begins_each_choice_with_its_prompt(prompt: object) -> None:
    answering = Answering("abc")
    async with pair_stack(answering.prompt, answering.completion) as running:
        whole = (await running.complete(prompt=prompt, echo=True)).json()
        chunks = await chunks_of(running, prompt=prompt, echo=True)
        several = (await running.complete(prompt=["x", "y"], echo=True)).json()
    assert whole["choices"][0]["text"] == "hüabc"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hüabc"
    assert [choice["text"] for choice in several["choices"]] == ["xabc", "yabc"]


async def test_priority_and_routing_key_reach_both_engines() -> None:
    answering = Answering("ok")
    async with pair_stack(answering.prompt, answering.completion) as running:
        running.client.headers["x-tandem-routing-key"] = "tenant-7"
        assert (await running.chat(priority=3)).status_code == 200
        assert (await running.complete(priority=2**31)).status_code == 400
        requests = [
            running.engines[0].calls[0].prompt_request,
            running.engines[1].calls[0].completion_request,
        ]
    assert [(r.priority, r.routing_key) for r in requests] == [(3, "tenant-7")] * 2


ASKS: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
}


@pytest.mark.parametrize("path", ASKS)
async def test_cache_salt_and_priority_reach_both_engines(path: str) -> None:
    answering = Answering("ok")
    async with pair_stack(answering.prompt, answering.completion) as running:
        body = {"model": "tiny", **ASKS[path], "cache_salt": "tenant-1", "priority": -3}
        assert (await running.client.post(path, json=body)).status_code == 200
        prompt, completion = (engine.calls[0] for engine in running.engines)
    told = prompt.prompt_request, completion.completion_request
    assert [(each.cache_salt, each.priority) for each in told] == [("tenant-1", -3)] * 2
