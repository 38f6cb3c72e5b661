"""`/v1/responses`, whole and streamed, as the `openai` client reads it."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.proxy.builders import MODEL, Answering, Stack, ids, pair_stack
from tests.proxy.mock_engines import Call
from tests.proxy.test_openai_client import client_of
from tests.proxy.test_tools import ARGUMENTS, CALL, CITY, FORCED, OTHER_CALL, roomy_stack

WEATHER = {"type": "function", "name": "get_weather", "parameters": CITY}
TIME = {"type": "function", "name": "get_time"}


async def post(running: Stack, **fields: object) -> Any:
    return await running.client.post("/v1/responses", json={"model": MODEL, "input": "hi", **fields})


async def answers(
    text: str, template: str = "", **fields: Any
) -> tuple[Response, Response, list[Any], Stack]:
    """The whole response, the streamed one, its events, and the stack."""
    more = {"template": template} if template else {}
    async with roomy_stack(text, **more) as running, client_of(running) as client:
        whole = await client.responses.create(**{"model": MODEL, "input": "hi", **fields})
        stream = await client.responses.create(**{"model": MODEL, "input": "hi", **fields}, stream=True)
        seen = [event async for event in stream]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[0].type == "response.created"
    return whole, seen[-1].response, seen, running


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        hidden = ("id", "call_id", "created_at")
        return {key: without_ids(item) for key, item in value.items() if key not in hidden}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


async def test_a_text_whole_and_streamed() -> None:
    whole, streamed, seen, _ = await answers("Grüße 🙂", metadata={"a": "b"}, instructions="Be kind.")
    assert whole.output_text == streamed.output_text == "Grüße 🙂"
    assert without_ids(whole.model_dump()) == without_ids(streamed.model_dump())
    assert (whole.status, whole.instructions, whole.metadata) == ("completed", "Be kind.", {"a": "b"})
    assert whole.model_dump()["store"] is False
    num_tokens = len(ids("Grüße 🙂")) + 1
    assert whole.usage is not None
    assert whole.usage.output_tokens == num_tokens
    kinds = [event.type for event in seen]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in seen[4:-4]) == "Grüße 🙂"


async def test_text_and_parallel_calls_are_items_of_their_own() -> None:
    whole, streamed, seen, _ = await answers(f"Wait. {CALL}{OTHER_CALL}", tools=[WEATHER, TIME])
    assert without_ids(whole.model_dump()) == without_ids(streamed.model_dump())
    assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
    calls = [(item.name, item.arguments) for item in whole.output[1:]]
    assert calls == [("get_weather", ARGUMENTS), ("get_time", "{}")]
    done = [event for event in seen if event.type == "response.function_call_arguments.done"]
    assert [(event.output_index, event.arguments) for event in done] == [(1, ARGUMENTS), (2, "{}")]


async def test_forced_calls() -> None:
    whole, _, _, running = await answers(FORCED, tools=[WEATHER, TIME], tool_choice="required")
    assert [item.name for item in whole.output] == ["get_weather", "get_time"]
    named = {"type": "function", "name": "get_weather"}
    whole, _, _, running = await answers(ARGUMENTS, tools=[WEATHER, TIME], tool_choice=named)
    assert (whole.output[0].name, whole.output[0].arguments) == ("get_weather", ARGUMENTS)
    structured = running.engines[0].calls[0].prompt_request.sampling.structured
    assert structured is not None
    assert json.loads(structured.value) == CITY
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}
    whole, streamed, _, running = await answers(OTHER_CALL, tools=[WEATHER, TIME], tool_choice=allowed)
    assert whole.model_dump()["tool_choice"] == streamed.model_dump()["tool_choice"] == allowed
    prompt = running.engines[0].calls[0].prompt_request.prompt_token_ids
    assert "get_weather" not in await running.services.text.text_of(prompt)


async def test_reasoning_is_an_item_before_the_message() -> None:
    template = "{{ messages[0].content }}<think>\n"
    whole, streamed, _, _ = await answers("hm</think>Yes", template)
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert whole.output[0].content[0].text == "hm"
    assert whole.output_text == "Yes"
    assert whole.usage.output_tokens_details.reasoning_tokens == len("hm</think")
    assert without_ids(whole.model_dump()) == without_ids(streamed.model_dump())


async def test_a_conversation_reaches_the_model() -> None:
    conversation = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": ARGUMENTS},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    _, _, _, running = await answers("ok", input=conversation, instructions="Be brief.")
    prompt = running.engines[0].calls[0].prompt_request.prompt_token_ids
    assert running.services.text.tokenizer.decode(list(prompt)) == (
        "system\nBe brief.user\nWeather?assistant\nLet me see.\n"
        f"{CALL}user\n<tool_response>\nsunny\n</tool_response>assistant\n"
    )


async def test_the_limit_makes_it_incomplete() -> None:
    answering = Answering("abc", finish_reason="length")
    async with pair_stack(answering.prompt, answering.completion) as running:
        response = (await post(running, max_output_tokens=3)).json()
        sampling = running.engines[0].calls[0].prompt_request.sampling
        last = events_of((await post(running, max_output_tokens=3, stream=True)).text)[-1]
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete", {"reason": "max_output_tokens"},
    )  # fmt: skip
    assert response["output"][0]["status"] == "incomplete"
    assert sampling.max_tokens == 3
    assert last["type"] == "response.incomplete"


def events_of(body: str) -> list[Any]:
    frames = body.removesuffix("\n\n").split("\n\n")
    pairs = [frame.split("\ndata: ", 1) for frame in frames]
    parsed = [(kind.removeprefix("event: "), json.loads(data)) for kind, data in pairs]
    assert all(kind == data["type"] for kind, data in parsed)
    return [data for _, data in parsed]


async def test_a_broken_stream_fails_and_raises() -> None:
    async def completion(call: Call) -> None:
        await call.accept()
        await call.tokens(1, ids("b"), finish_reason="error")
        await call.end()

    prompt = Answering("a", finish_reason=None).prompt
    async with pair_stack(prompt, completion, max_migrations=0) as running, client_of(running) as client:
        stream = await client.responses.create(model=MODEL, input="hi", stream=True)
        seen = [await anext(stream) for _ in range(7)]
        with pytest.raises(openai.APIError, match="engine"):
            await anext(stream)
    assert (seen[-1].type, seen[-1].response.status) == ("response.failed", "failed")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": []}, "input", "invalid_value"),
        ({"input": None}, "input", "invalid_type"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "invalid_type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "invalid_value"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content",
            "unsupported_parameter",
        ),
        ({"input": "x" * 5000}, "input", "context_length_exceeded"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "context_length_exceeded"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "unsupported_parameter"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "invalid_value"),
        ({"tools": [TIME, TIME]}, "tools", "invalid_value"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "invalid_value"),
    ],
)
async def test_bad_fields_are_named(fields: dict[str, Any], param: str, code: str) -> None:
    answering = Answering("ok")
    async with pair_stack(answering.prompt, answering.completion) as running:
        response = await post(running, **fields)
    assert response.status_code == 400
    assert (response.json()["error"]["param"], response.json()["error"]["code"]) == (param, code)


async def test_parse_fills_a_model_from_the_answers_schema() -> None:
    import pydantic

    class City(pydantic.BaseModel):
        name: str

    async with roomy_stack('{"name": "Bern"}') as running, client_of(running) as client:
        answer = await client.responses.parse(model=MODEL, input="hi", text_format=City)
    assert answer.output_parsed == City(name="Bern")
    structured = running.engines[0].calls[0].prompt_request.sampling.structured
    assert structured is not None
    assert json.loads(structured.value)["properties"]["name"]["type"] == "string"
