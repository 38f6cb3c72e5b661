"""The `openai` client works against the proxy without a special case."""

import asyncio
from collections.abc import AsyncIterator

import httpx2
import openai
import pytest
import pytest_asyncio

from tests.proxy.builders import Answering, Stack, ids, pair_stack
from tests.proxy.mock_engines import Call

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
        async with asyncio.timeout(1):
            await (await running.engines[1].call()).client_left.wait()
