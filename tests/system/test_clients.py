"""Clients that people use have a conversation with a real stack, without a special case.

The npm package `openai` is installed by `make test`, where there is npm; without it its part is skipped.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Literal

import httpx
import openai
import pydantic
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from tests.system.processes import RunningStack

pytestmark = pytest.mark.system

MODEL = "smollm2-135m-instruct"
NODE = Path(__file__).parent.parent / "node"
MESSAGES = [{"role": "user", "content": "Name a colour."}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def text_of(client: openai.OpenAI) -> str:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=12
    )
    assert answer.choices[0].message.content
    return answer.choices[0].message.content


def test_python(stack: RunningStack) -> None:
    with stack.client() as client:
        text = text_of(client)
        with client.chat.completions.stream(
            model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=12, stop=[" "]
        ) as stream:  # this helper takes an answer that the limit ended for an error
            assert stream.get_final_completion().choices[0].message.content == text.partition(" ")[0]
        options = {"model": MODEL, "input": "Name a colour.", "temperature": 0, "max_output_tokens": 12}
        assert client.responses.create(**options).output_text == text
        with client.responses.stream(**options, extra_body={"stop": [" "]}) as events:
            assert events.get_final_response().output_text == text.partition(" ")[0]


class Answer(pydantic.BaseModel):
    colour: Literal["red", "green", "blue"]
    is_warm: bool


def test_forms_and_forced_calls(stack: RunningStack) -> None:
    """The engine follows schemas, so that even this small model fills a form and calls what it must."""
    options = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 120}
    tools = [{"type": "function", "function": WEATHER}]
    with stack.client() as client:
        parsed = client.chat.completions.parse(**options, response_format=Answer).choices[0].message.parsed
        assert isinstance(parsed, Answer)
        forced = client.responses.parse(
            model=MODEL, input="Name a colour.", text_format=Answer, temperature=0, max_output_tokens=120
        )
        assert forced.output_parsed == parsed
        named = {"type": "function", "function": {"name": "get_weather"}}
        for choice in ("required", named):
            said = client.chat.completions.create(
                **options, tools=tools, tool_choice=choice, parallel_tool_calls=False
            ).choices[0]
            assert said.finish_reason == "tool_calls"
            assert said.message.tool_calls is not None
            (call,) = said.message.tool_calls
            assert call.function.name == "get_weather"
            assert isinstance(json.loads(call.function.arguments)["city"], str)


def test_langchain(stack: RunningStack) -> None:
    with stack.client() as client:
        text = text_of(client)
    model = ChatOpenAI(
        model=MODEL, base_url=stack.url + "/v1", api_key="none", temperature=0, max_completion_tokens=12
    )
    answer = model.invoke([HumanMessage("Name a colour.")])
    chunks = list(model.stream([HumanMessage("Name a colour.")], stream_usage=True))
    assert answer.content == "".join(str(chunk.content) for chunk in chunks) == text
    whole = sum(chunks[1:], chunks[0])
    assert answer.usage_metadata is not None
    assert whole.usage_metadata == answer.usage_metadata
    call = {"name": "get_weather", "args": {"city": "Bern"}, "id": "call_1"}
    after_tool = model.bind_tools([{"type": "function", "function": WEATHER}]).invoke(
        [
            HumanMessage("How is the weather in Bern?"),
            AIMessage("", tool_calls=[call]),
            ToolMessage("Sunny, 21 degrees.", tool_call_id="call_1"),
        ]
    )
    assert isinstance(after_tool, AIMessage)


def test_node(stack: RunningStack) -> None:
    node = shutil.which("node")
    if node is None or not (NODE / "node_modules" / "openai").is_dir():
        pytest.skip("NOT TESTED: the npm package openai (no node, or 'make test' found no npm to install it)")
    done = subprocess.run(
        [node, "conversation.mjs", stack.url + "/v1", MODEL],
        cwd=NODE,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with stack.client() as client:
        assert json.loads(done.stdout)["text"] == text_of(client)
    stack.wait_until_nothing_is_pinned()


def test_a_router_of_others_drives_the_two_legs(stack: RunningStack) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    with httpx.Client(base_url=stack.url, timeout=120) as client:
        whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]
        ask = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
        first = client.post("/v1/chat/completions", json={**body, **ask}).json()
        params = first["kv_transfer_params"]
        second = client.post("/v1/chat/completions", json={**body, "kv_transfer_params": params}).json()
    assert second["choices"][0] == whole
    assert whole["message"]["content"].startswith(first["choices"][0]["message"]["content"])
