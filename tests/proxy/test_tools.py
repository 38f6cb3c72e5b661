"""Tools through the whole proxy: what the model is told, and what clients get."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from proxy.chat_template import ChatTemplate
from proxy.tools.choice import ToolUse
from proxy.tools.definitions import FunctionDefinition
from proxy.tools.formats import tool_format_of
from proxy.tools.rendering import plain_messages
from tests.proxy.builders import TEMPLATE, Answering, Stack, events, ids, stack
from tests.proxy.mock_engines import Call, MockEngine

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
TIME = {"type": "function", "function": {"name": "get_time"}}
ARGUMENTS = '{"city": "Zürich"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'

Choice = dict[str, Any]


def roomy_stack(text: str, **settings: object) -> Any:
    answering = Answering(text)
    engines = MockEngine("prompt", answering.prompt), MockEngine("completion", answering.completion)
    for engine in engines:
        engine.info = replace(engine.info, max_model_len=4096)
    return stack(*engines, **settings)


async def answers(text: str, template: str = TEMPLATE, **fields: object) -> tuple[Choice, Choice, Stack]:
    """The choice of a whole answer, the same put together from a stream, and the stack that gave them."""
    async with roomy_stack(text, template=template) as running:
        whole = await running.chat(**fields)
        assert whole.status_code == 200, whole.text
        streamed = await running.chat(stream=True, **fields)
    *chunks, done = events(streamed.text)
    assert done == "[DONE]"
    return whole.json()["choices"][0], joined([json.loads(chunk) for chunk in chunks]), running


def joined(chunks: Sequence[Any]) -> Choice:
    """As SDKs put deltas together."""
    choice: Choice = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None}
    for part in (choice for chunk in chunks for choice in chunk["choices"]):
        delta = part["delta"]
        for name in ("content", "reasoning_content"):
            choice[name] += delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert (call["index"], call["type"]) == (len(choice["tool_calls"]), "function")
                choice["tool_calls"].append(call["function"])
            else:
                assert list(call["function"]) == ["arguments"]
                choice["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        choice["finish_reason"] = part["finish_reason"] or choice["finish_reason"]
    return choice


def functions_of(choice: Choice) -> list[dict[str, str]]:
    calls = choice["message"].get("tool_calls", [])
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    return [call["function"] for call in calls]


TWO_CALLS = [{"name": "get_weather", "arguments": ARGUMENTS}, {"name": "get_time", "arguments": "{}"}]


async def test_parallel_calls_and_text_whole_and_streamed() -> None:
    whole, streamed, _ = await answers(f"Let me see. {CALL}\n{OTHER_CALL}", tools=[WEATHER, TIME])
    assert functions_of(whole) == streamed["tool_calls"] == TWO_CALLS
    assert whole["message"]["content"] == streamed["content"] == "Let me see. "
    assert whole["finish_reason"] == streamed["finish_reason"] == "tool_calls"


async def test_only_calls_have_no_content() -> None:
    whole, _, _ = await answers(CALL, tools=[WEATHER])
    assert whole["message"]["content"] is None


async def test_without_tools_or_with_none_of_them_nothing_is_a_call() -> None:
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        whole, streamed, running = await answers(CALL, **fields)
        assert whole["message"]["content"] == streamed["content"] == CALL
        assert whole["finish_reason"] == "stop"
        prompt = running.engines[0].calls[0].prompt_request
        assert "get_weather" not in await running.services.text.text_of(prompt.prompt_token_ids)


async def test_without_parallel_calls_the_first_one_ends_the_answer() -> None:
    whole, streamed, _ = await answers(
        f"{CALL}\n{OTHER_CALL}", tools=[WEATHER, TIME], parallel_tool_calls=False
    )
    assert functions_of(whole) == streamed["tool_calls"] == TWO_CALLS[:1]
    assert whole["finish_reason"] == streamed["finish_reason"] == "tool_calls"


FORCED = f'[{{"name": "get_weather", "arguments": {ARGUMENTS}}}, {{"name": "get_time", "arguments": {{}}}}]'


async def test_required_calls_are_forced_by_the_answers_form() -> None:
    whole, streamed, running = await answers(FORCED, tools=[WEATHER, TIME], tool_choice="required")
    assert functions_of(whole) == streamed["tool_calls"] == TWO_CALLS
    assert whole["finish_reason"] == "tool_calls"
    structured = running.engines[0].calls[0].prompt_request.sampling.structured
    assert structured is not None
    schema = json.loads(structured.value)
    calls = schema["items"]["anyOf"]
    assert [call["properties"]["name"]["enum"] for call in calls] == [["get_weather"], ["get_time"]]
    assert calls[0]["properties"]["arguments"] == CITY


async def test_a_named_call_is_the_functions_arguments() -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    whole, streamed, running = await answers(ARGUMENTS, tools=[WEATHER, TIME], tool_choice=choice)
    assert functions_of(whole) == streamed["tool_calls"] == TWO_CALLS[:1]
    structured = running.engines[0].calls[0].prompt_request.sampling.structured
    assert structured is not None
    assert json.loads(structured.value) == CITY


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_of_allowed_tools_only_those_are_offered_and_in_required_mode_forced() -> None:
    for mode, text in (("auto", OTHER_CALL), ("required", '[{"name": "get_time", "arguments": {}}]')):
        whole, streamed, running = await answers(
            text, tools=[WEATHER, TIME], tool_choice=allowed(mode, "get_time")
        )
        assert functions_of(whole) == streamed["tool_calls"] == TWO_CALLS[1:]
        request = running.engines[0].calls[0].prompt_request
        told = await running.services.text.text_of(request.prompt_token_ids)
        assert "get_time" in told
        assert "get_weather" not in told
        structured = request.sampling.structured
        assert (structured is not None) == (mode == "required")
        assert structured is None or "get_weather" not in structured.value


def test_definitions_of_parameters_stay_reachable_when_calls_are_forced() -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/A"}},
        "$defs": {"A": {"type": "array", "items": {"$ref": "#/$defs/A"}}},
    }
    functions = (FunctionDefinition(name="f"), FunctionDefinition(name="g", parameters=parameters))
    structured = ToolUse(functions=functions, is_required=True).structured_output()
    assert structured is not None
    schema = json.loads(structured.value)
    assert schema["$defs"] == {"f1_A": {"type": "array", "items": {"$ref": "#/$defs/f1_A"}}}
    arguments = schema["items"]["anyOf"][1]["properties"]["arguments"]
    assert arguments == {"type": "object", "properties": {"a": {"$ref": "#/$defs/f1_A"}}}


CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": TWO_CALLS[0]}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "c2", "content": "warm"},
]


async def test_a_conversation_with_results_is_told_to_a_model_whose_template_knows_no_tools() -> None:
    _, _, running = await answers("Sunny.", tools=[WEATHER], messages=CONVERSATION)
    prompt = running.engines[0].calls[0].prompt_request.prompt_token_ids
    text = await running.services.text.text_of(prompt)
    assert "Be brief." in text
    assert json.dumps(WEATHER) in text
    assert CALL in text
    assert "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nwarm\n</tool_response>" in text
    assert text.count("user\n") == 2, "both results are one message"


def test_a_template_that_knows_tools_gets_them_and_calls_with_parsed_arguments() -> None:
    template = ChatTemplate(
        "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
        "{% for m in messages %}{{ m.tool_calls[0].function.arguments.city }}{% endfor %}",
        {},
    )
    assert template.takes_tools
    call = {"function": {"name": "f", "arguments": {"city": "Bern"}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    tools = ToolUse(functions=(FunctionDefinition(name="f"),)).for_template()
    assert template.render(messages, tools) == "fBern"


def test_instructions_go_into_a_system_message_of_their_own_where_there_is_none() -> None:
    use = ToolUse(functions=(FunctionDefinition(name="f"),))
    first, second = plain_messages([{"role": "user", "content": "x"}], use)
    assert (first["role"], second) == ("system", {"role": "user", "content": "x"})
    assert '{"type": "function", "function": {"name": "f"}}' in first["content"]


@pytest.mark.parametrize(
    ("template", "format"),
    [
        (None, "hermes"),
        ("{{ messages }}", "hermes"),
        ("<tool_call>{{ x }}</tool_call>", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ('{"name": ..., "parameters": {}}', "llama3_json"),
    ],
)
def test_the_template_tells_the_format(template: str | None, format: str) -> None:
    assert tool_format_of(template) == format


async def test_a_call_that_the_limit_cuts_off_is_a_length_stop() -> None:
    async def completion(call: Call) -> None:
        await call.accept()
        await call.tokens(1, ids(CALL[1:60]), finish_reason="length")
        await call.end()

    engines = MockEngine("prompt", Answering("<").prompt), MockEngine("completion", completion)
    for engine in engines:
        engine.info = replace(engine.info, max_model_len=4096)
    async with stack(*engines) as running:
        answer = (await running.chat(tools=[WEATHER])).json()["choices"][0]
    assert answer["finish_reason"] == "length"
    assert functions_of(answer)[0]["name"] == "get_weather"


MAY_THINK = "{{ messages[0].content }}{{ '<think>' if false }}"
MUST_THINK = "{{ messages[0].content }}<think>\n"


@pytest.mark.parametrize(
    ("template", "text"),
    [(MAY_THINK, "<think>\nhm, ok</think>\n\nYes"), (MUST_THINK, "hm, ok</think>\n\nYes")],
)
async def test_thoughts_are_no_content(template: str, text: str) -> None:
    whole, streamed, _ = await answers(text, template=template)
    assert whole["message"]["reasoning_content"] == streamed["reasoning_content"] == "hm, ok"
    assert whole["message"]["content"] == streamed["content"] == "Yes"


async def test_thoughts_and_calls() -> None:
    whole, streamed, _ = await answers(f"<think>which?</think>{CALL}", template=MAY_THINK, tools=[WEATHER])
    assert functions_of(whole) == streamed["tool_calls"] == TWO_CALLS[:1]
    assert whole["message"]["reasoning_content"] == "which?"
