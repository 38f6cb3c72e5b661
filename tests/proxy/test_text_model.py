import asyncio
from typing import Any

import pytest

from proxy.errors import BadRequest, ContextExceeded
from proxy.text_model import INLINE_CHARS, ChatPrompt, TextModel
from tests.proxy.builders import ids, text_model


async def test_a_model_without_a_template_has_no_chat() -> None:
    with pytest.raises(BadRequest, match="no chat template"):
        await text_model(template=None).chat_prompt([{"role": "user", "content": "x"}], 100)


async def test_large_texts_are_tokenized_off_the_event_loop() -> None:
    model, text = text_model(), "é" * INLINE_CHARS * 2
    task = asyncio.create_task(model.text_prompt(text, 10_000))
    await asyncio.sleep(0)
    assert not task.done()
    assert list(await task) == ids(text)
    model.close()


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": ""}] * INLINE_CHARS,
        [{"role": "assistant", "content": "", "reasoning_content": "x" * INLINE_CHARS}],
        [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}],
    ],
)
async def test_chats_that_are_large_without_content_are_rendered_off_the_event_loop(
    messages: list[dict[str, Any]],
) -> None:
    model = text_model()
    task = asyncio.create_task(model.chat_prompt(messages, 10**6))
    await asyncio.sleep(0)
    assert not task.done()
    await task
    model.close()


async def test_a_long_text_does_not_stop_the_event_loop(smollm: TextModel) -> None:
    text, num_turns = "lorem ipsum 12 " * 20_000, 0
    task = asyncio.create_task(smollm.text_prompt(text, 10**6))
    while not task.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert num_turns > 5, "tokenizing on the loop would take one turn"
    token_ids = await task
    assert token_ids == tuple(smollm.tokenizer.encode(text).ids)
    assert await smollm.text_of(token_ids) == text


async def test_large_and_small_chats_are_rendered_alike() -> None:
    model = text_model(template="{{ messages[0].content[:3] }}")
    small, large = "abc", "abc" * INLINE_CHARS
    prompts = [
        await model.chat_prompt([{"role": "user", "content": text}], 10_000) for text in (small, large)
    ]
    assert prompts[0] == prompts[1] == ChatPrompt(tuple(ids("abc")), is_thinking=False)
    model.close()


async def test_the_embedded_models_special_tokens_are_tokens_of_their_own(smollm: TextModel) -> None:
    prompt = (await smollm.chat_prompt([{"role": "user", "content": "Hi"}], 10_000)).token_ids
    start, end = (smollm.tokenizer.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
    assert prompt.count(start) == 3
    assert prompt.count(end) == 2
    assert smollm.eos_token_ids == {end}


async def test_a_hopeless_prompt_is_refused_without_tokenizing_it_whole(smollm: TextModel) -> None:
    async with asyncio.timeout(5):
        with pytest.raises(ContextExceeded) as caught:
            await smollm.text_prompt("1 2 3 " * 500_000, 1000)
    assert caught.value.error.param == "prompt"


async def test_a_long_text_of_few_tokens_is_tokenized_whole(smollm: TextModel) -> None:
    text = " " * (81 * 500)
    prompt = await smollm.text_prompt(text, 1000)
    assert len(prompt) <= 1000
    assert smollm.tokenizer.decode(list(prompt)) == text
