"""Whatever a client sends: a 4xx in exactly OpenAI's shape that names the field; no 500, no hang."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.proxy.builders import Answering, Stack, chat_body, pair_stack, text_body
from tests.proxy.test_tools import allowed

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    answering = Answering("ok")
    async with pair_stack(answering.prompt, answering.completion, max_body_bytes=1 << 20) as running:
        yield running


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def refused(stack: Stack, path: str, content: bytes, status: int = 400) -> dict[str, Any]:
    """The error object of a request that must be refused before any engine sees it."""
    num_calls = [len(engine.calls) for engine in stack.engines]
    async with asyncio.timeout(10):
        response = await stack.client.post(path, content=content)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["type"] == "invalid_request_error"
    assert [len(engine.calls) for engine in stack.engines] == num_calls
    error: dict[str, Any] = body["error"]
    return error


def message(**fields: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "hi", **fields}]


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def called(arguments: str) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    return message(role="assistant", tool_calls=[{**CALL, "function": function}])


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "hi"}, "messages", "invalid_type"),
        ({"messages": None}, "messages", "invalid_type"),
        ({"messages": [1]}, "messages[0]", "invalid_type"),
        ({"messages": message(role="robot")}, "messages[0].role", "invalid_value"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": message(content=5)}, "messages[0].content", "invalid_type"),
        ({"messages": message(content=[5])}, "messages[0].content", "unsupported_parameter"),
        (
            {"messages": message(content=[{"type": "image_url", "image_url": {"url": "x"}}])},
            "messages[0].content",
            "unsupported_parameter",
        ),
        ({"messages": message(content=[{"type": "text"}])}, "messages[0].content", "invalid_type"),
        ({"messages": message(role="tool")}, "messages[0].tool_call_id", "missing_required_parameter"),
        ({"messages": message(role="function")}, "messages[0].function_call", "unsupported_parameter"),
        ({"messages": message(tool_calls=[CALL])}, "messages[0].tool_calls", "invalid_value"),
        (
            {"messages": message(role="assistant", tool_calls=[{**CALL, "id": 1}])},
            "messages[0].tool_calls[0].id",
            "invalid_type",
        ),
        ({"messages": message(content="x" * 300)}, "messages", "context_length_exceeded"),
        ({"max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 10**6}, "max_tokens", "context_length_exceeded"),
        ({"max_tokens": 2**63 - 1}, "max_tokens", "context_length_exceeded"),
        ({"max_tokens": 10**30}, "max_tokens", "context_length_exceeded"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
        ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
        ({"max_tokens": True}, "max_tokens", "invalid_type"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "invalid_value"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens", "context_length_exceeded"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
        ({"temperature": -0.1}, "temperature", "invalid_value"),
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"top_p": 1.1}, "top_p", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"seed": "x"}, "seed", "invalid_type"),
        ({"stop": ""}, "stop[0]", "invalid_value"),
        ({"stop": ["a", 1]}, "stop[1]", "invalid_type"),
        ({"stop": 1}, "stop", "invalid_type"),
        ({"stop": ["a"] * 17}, "stop", "invalid_value"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value"),
        ({"logprobs": 1}, "logprobs", "invalid_type"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
            "invalid_type",
        ),
        ({"stream": True, "stream_options": 1}, "stream_options", "invalid_type"),
        ({"n": 9}, "n", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": True}, "n", "invalid_type"),
        ({"n": 1.5}, "n", "invalid_type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "unsupported_parameter"),
        ({"tools": [tool("a b")]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [tool("f"), tool("f")]}, "tools", "invalid_value"),
        ({"tools": [tool("f")] * 129}, "tools", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [tool("f")], "tool_choice": "any"}, "tool_choice", "invalid_value"),
        ({"tools": [tool("f")], "tool_choice": named("g")}, "tool_choice", "invalid_value"),
        ({"tools": [tool("f")], "tool_choice": {"type": "function"}}, "tool_choice", "invalid_value"),
        ({"tools": [tool("f")], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "invalid_value"),
        ({"tools": [tool("f")], "tool_choice": allowed("auto", "g")}, "tool_choice", "invalid_value"),
        ({"tools": [tool("f")], "tool_choice": allowed("none", "f")}, "tool_choice", "invalid_value"),
        ({"tools": [tool("f")], "tool_choice": allowed("auto")}, "tool_choice", "invalid_value"),
        (
            {
                "tools": [tool("f")],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "tool_choice",
            "invalid_value",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
        ({"response_format": {"type": "xml"}}, "response_format", "invalid_value"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "missing_required_parameter",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
            "missing_required_parameter",
        ),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex",
            "invalid_value",
        ),
        ({"guided_json": "{"}, "guided_json", "invalid_json"),
        ({"guided_json": "[]"}, "guided_json", "invalid_value"),
        ({"guided_json": "[" * 100_000}, "guided_json", "invalid_json"),
        ({"guided_json": '{"a": "\\ud800"}'}, "guided_json", "invalid_json"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "invalid_value"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 1}, "min_tokens", "invalid_value"),
        ({"messages": called("[" * 100_000)}, "messages", "invalid_value"),
        ({"guided_choice": []}, "guided_choice", "invalid_value"),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "invalid_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "invalid_value"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias", "invalid_value"),
        ({"presence_penalty": 2.5}, "presence_penalty", "invalid_value"),
        ({"frequency_penalty": -2.5}, "frequency_penalty", "invalid_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"min_p": 1.5}, "min_p", "invalid_value"),
        ({"min_tokens": -1}, "min_tokens", "invalid_value"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens", "invalid_value"),
        ({"chat_template": "x"}, "chat_template", "unsupported_parameter"),
        ({"continue_final_message": True}, "continue_final_message", "unsupported_parameter"),
        ({"echo": True}, "echo", "unsupported_parameter"),
        ({"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
        ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
    ],
)
async def test_chat_names_the_bad_field(
    stack: Stack, fields: dict[str, Any], param: str, code: str | None
) -> None:
    error = await refused(stack, CHAT, json.dumps(chat_body(**fields)).encode())
    assert (error["param"], error["code"]) == (param, code)
    assert param.split("[")[0].split(".")[0] in error["message"] or code == "context_length_exceeded"


@pytest.mark.parametrize("depth", [300, 800, 900, 930, 960, 990, 1100])
async def test_deep_json_is_never_a_500(stack: Stack, depth: int) -> None:
    text = '{"a":' * depth + "1" + "}" * depth
    deep_tool = {"type": "function", "function": {"name": "f", "parameters": "DEEP"}}
    bodies = [
        {"messages": called(text)},
        {"guided_json": text},
        {"guided_json": "DEEP"},
        {"tools": [deep_tool], "tool_choice": "required"},
        {"tools": [deep_tool]},
    ]
    for fields in bodies:
        content = json.dumps(chat_body(**fields)).replace('"DEEP"', text)
        response = await stack.client.post(CHAT, content=content.encode())
        assert response.status_code < 500, response.text


async def test_arguments_with_half_a_surrogate_pair_are_a_text(stack: Stack) -> None:
    assert (await stack.chat(messages=called('{"a":"\\ud800"}'))).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": None}, "prompt", "invalid_value"),
        ({"prompt": [[]]}, "prompt", "invalid_value"),
        ({"prompt": ["a", 1]}, "prompt", "invalid_value"),
        ({"prompt": [1, True]}, "prompt", "invalid_value"),
        ({"prompt": [-1]}, "prompt", "invalid_value"),
        ({"prompt": [10**6]}, "prompt", "invalid_value"),
        ({"prompt": [10**30]}, "prompt", "invalid_value"),
        ({"prompt": {"text": "a"}}, "prompt", "invalid_value"),
        ({"prompt": ["a", ""]}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 65}, "prompt", None),
        ({"prompt": "x" * 256}, "prompt", "context_length_exceeded"),
        ({"prompt": [1] * 1000}, "prompt", "context_length_exceeded"),
        ({"prompt": "x" * 255, "max_tokens": 2}, "max_tokens", "context_length_exceeded"),
        ({"logprobs": -1}, "logprobs", "invalid_value"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"logprobs": True}, "logprobs", "invalid_type"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens", "invalid_value"),
        (
            {"echo": True, "logprobs": 1, "kv_transfer_params": {"do_remote_decode": True}},
            "logprobs",
            "unsupported_parameter",
        ),
        ({"tools": [tool("f")]}, "tools", "unsupported_parameter"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"best_of": 2}, "best_of", "unsupported_parameter"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "unsupported_parameter"),
    ],
)
async def test_text_completion_names_the_bad_field(
    stack: Stack, fields: dict[str, Any], param: str, code: str | None
) -> None:
    error = await refused(stack, TEXT, json.dumps(text_body(**fields)).encode())
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_missing_fields_are_named(stack: Stack, path: str) -> None:
    assert (await refused(stack, path, b"{}"))["param"] == "model"


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_an_unknown_model_is_404(stack: Stack, path: str) -> None:
    body = {**chat_body(), **text_body(), "model": "gpt-9"}
    error = await refused(stack, path, json.dumps(body).encode(), status=404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b'"text"',
        b"null",
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b"[" * 100_000,
        b'{"messages":' * 50_000,
        b'{"model": "tiny"} trailing',
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_malformed_json_is_400(stack: Stack, path: str, content: bytes) -> None:
    assert (await refused(stack, path, content))["code"] == "invalid_json"


async def test_a_body_over_the_limit_is_413(stack: Stack) -> None:
    error = await refused(stack, CHAT, b"x" * (10 << 20), status=413)
    assert str(1 << 20) in error["message"]


async def test_a_body_over_the_limit_without_its_length_is_413(stack: Stack) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"x" * (1 << 20)

    response = await stack.client.post(CHAT, content=chunks())
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"


async def test_a_large_body_is_refused_before_it_has_arrived(stack: Stack) -> None:
    host, port = stack.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10000000\r\n\r\n{")
    async with asyncio.timeout(4):
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    writer.close()
    await writer.wait_closed()


async def test_fields_that_ask_for_nothing_are_accepted(stack: Stack) -> None:
    neutral = {
        "n": 1, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logit_bias": {},
        "presence_penalty": 0, "frequency_penalty": 0.0, "modalities": ["text"], "audio": None, "stop": None,
        "max_tokens": None, "temperature": None, "top_p": None, "seed": None, "logprobs": False,
        "top_logprobs": None, "stream": None, "stream_options": None, "best_of": 1, "echo": False,
    }  # fmt: skip
    assert (await stack.chat(**neutral)).status_code == 200


async def test_fields_nobody_knows_are_ignored(stack: Stack) -> None:
    response = await stack.chat(user="u", metadata={"a": "b"}, store=False, service_tier="auto", made_up=[1])
    assert response.status_code == 200


async def test_text_parts_are_joined(stack: Stack) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert (await stack.chat(messages=message(content=parts))).status_code == 200
    token_ids = stack.engines[0].calls[-1].prompt_request.prompt_token_ids
    assert "one\ntwo" in stack.services.text.tokenizer.decode(token_ids)


async def test_unknown_paths_and_methods_have_the_shape_too(stack: Stack) -> None:
    missing = await stack.client.post("/v1/nothing")
    wrong_method = await stack.client.get(CHAT)
    assert (missing.status_code, wrong_method.status_code) == (404, 405)
    assert wrong_method.headers["allow"] == "POST"
    for response in (missing, wrong_method):
        assert list(response.json()["error"]) == ["message", "type", "param", "code"]


async def test_an_unknown_model_has_no_page(stack: Stack) -> None:
    response = await stack.client.get("/v1/models/nope/x")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert (await stack.client.get("/v1/models/tiny")).json()["id"] == "tiny"
