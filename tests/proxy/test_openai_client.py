"""The `openai` client, and LangChain's, work against the proxy without a special case."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx2
import openai
import pydantic
import pytest
import pytest_asyncio
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from tests.proxy.builders import MODEL, TOKENIZER, Answering, Stack, ids, pair_stack, stack
from tests.proxy.mock_engines import Call, MockEngine

TEXT = "Grüße 🙂"


@pytest_asyncio.fixture
async def running() -> AsyncIterator[Stack]:
    answering = Answering(TEXT, num_cached_tokens=3)
    async with pair_stack(answering.prompt, answering.completion) as running:
        yield running


def client_of(running: Stack, **options: int) -> openai.AsyncOpenAI:
    http_client = httpx2.AsyncClient(trust_env=False)
    return openai.AsyncOpenAI(
        base_url=running.url + "/v1", api_key="any", max_retries=0, http_client=http_client, **options
    )


MESSAGES = [{"role": "user", "content": "hi"}]


async def test_chat(running: Stack) -> None:
    async with client_of(running) as client:
        answer = await client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_chat_streamed_with_usage(running: Stack) -> None:
    async with client_of(running) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + len(ids(TEXT)) + 1


async def test_the_streaming_helper_accumulates_the_answer(running: Stack) -> None:
    async with (
        client_of(running) as client,
        client.chat.completions.stream(model="tiny", messages=MESSAGES) as stream,
    ):
        answer = await stream.get_final_completion()
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"


async def test_text_completion_streamed_and_not(running: Stack) -> None:
    async with client_of(running) as client:
        whole = await client.completions.create(model="tiny", prompt="hi")
        stream = await client.completions.create(model="tiny", prompt="hi", stream=True)
        streamed = "".join([chunk.choices[0].text async for chunk in stream])
    assert whole.choices[0].text == streamed == TEXT


async def test_models(running: Stack) -> None:
    async with client_of(running) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"


async def test_errors_are_the_sdks_exceptions(running: Stack) -> None:
    async with client_of(running) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="nope", prompt="hi")
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="tiny", prompt="hi", n=9)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert (bad.value.code, bad.value.param) == ("invalid_value", "n")
    assert "8" in bad.value.message


async def test_a_broken_stream_raises() -> None:
    async def completion(call: Call) -> None:
        await call.accept()
        await call.tokens(1, ids("b"))
        await call.tokens(2, ids("c"), finish_reason="insufficient_system_resource")
        await call.end()

    async with (
        pair_stack(Answering("a", finish_reason=None).prompt, completion) as running,
        client_of(running) as client,
    ):
        stream = await client.completions.create(model="tiny", prompt="hi", stream=True)
        with pytest.raises(openai.APIError, match="KV blocks"):
            async for _ in stream:
                pass


async def test_closing_a_stream_cancels_the_request() -> None:
    async def completion(call: Call) -> None:
        await call.accept()
        await asyncio.Event().wait()

    async with (
        pair_stack(Answering("a", finish_reason=None).prompt, completion) as running,
        client_of(running) as client,
    ):
        stream = await client.completions.create(model="tiny", prompt="hi", stream=True)
        async for _ in stream:
            break
        await stream.close()
        async with asyncio.timeout(4):
            await (await running.engines[1].call()).client_left.wait()


def replying(reply: Callable[[str], str]) -> Any:
    """A stack whose model's answer is a function of the prompt's text."""

    async def prompt(call: Call) -> None:
        text = TOKENIZER.decode(list(call.prompt_request.prompt_token_ids))
        await Answering(reply(text)).prompt(call)

    async def completion(call: Call) -> None:
        text = TOKENIZER.decode(list(call.completion_request.prompt_token_ids))
        await Answering(reply(text)).completion(call)

    engines = MockEngine("prompt", prompt), MockEngine("completion", completion)
    for engine in engines:
        engine.info = replace(engine.info, max_model_len=4096)
    return stack(*engines)


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]


def weather(prompt: str) -> str:
    if "<tool_response>\nsunny" in prompt:
        return "It is sunny in Bern."
    return '<tool_call>{"name": "get_weather", "arguments": {"city": "Bern"}}</tool_call>'


async def test_a_conversation_with_a_tool_whole_and_streamed() -> None:
    messages: list[Any] = [{"role": "user", "content": "Weather in Bern?"}]
    async with replying(weather) as running, client_of(running) as client:
        first = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        async with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
        said = first.choices[0].message
        assert said.tool_calls is not None
        (call,) = said.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        second = await client.chat.completions.create(
            model=MODEL, messages=[*messages, said, result], tools=TOOLS
        )
    assert json.loads(call.function.arguments) == {"city": "Bern"}
    assert streamed.finish_reason == first.choices[0].finish_reason == "tool_calls"
    assert json.loads(streamed.message.tool_calls[0].function.arguments) == {"city": "Bern"}
    assert second.choices[0].message.content == "It is sunny in Bern."


class City(pydantic.BaseModel):
    name: str
    population: int


async def test_parse_fills_a_model_and_sends_its_schema() -> None:
    async with replying(lambda _: '{"name": "Bern", "population": 137000}') as running:
        async with client_of(running) as client:
            answer = await client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=City)
        structured = running.engines[0].calls[0].prompt_request.sampling.structured
    assert answer.choices[0].message.parsed == City(name="Bern", population=137000)
    assert json.loads(structured.value)["required"] == ["name", "population"]


async def test_the_synchronous_client(running: Stack) -> None:
    def talk() -> tuple[str, str]:
        http_client = httpx2.Client(trust_env=False)
        with openai.OpenAI(
            base_url=running.url + "/v1", api_key="any", max_retries=0, http_client=http_client
        ) as client:
            whole = client.chat.completions.create(model=MODEL, messages=MESSAGES)
            stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        return whole.choices[0].message.content or "", streamed

    assert await asyncio.to_thread(talk) == (TEXT, TEXT)


async def test_langchain_calls_tools_and_fills_models() -> None:
    options = {"model": MODEL, "api_key": "any", "max_retries": 0}
    async with replying(weather) as running:
        model = ChatOpenAI(base_url=running.url + "/v1", **options).bind_tools(TOOLS)
        question = HumanMessage("Weather in Bern?")
        first = await model.ainvoke([question])
        chunks = [chunk async for chunk in model.astream([question])]
        second = await model.ainvoke(
            [question, first, ToolMessage("sunny", tool_call_id=first.tool_calls[0]["id"])]
        )
    calls = [(call["name"], call["args"]) for call in first.tool_calls]
    assert calls == [("get_weather", {"city": "Bern"})]
    assert sum(chunks[1:], chunks[0]).tool_calls[0]["args"] == {"city": "Bern"}
    assert second.content == "It is sunny in Bern."
    async with replying(lambda _: '{"name": "Bern", "population": 1}') as running:
        model = ChatOpenAI(base_url=running.url + "/v1", **options).with_structured_output(City)
        assert await model.ainvoke("Bern?") == City(name="Bern", population=1)
