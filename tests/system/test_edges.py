"""Requests that end at the first token, or around it: right text, reason and usage, and nothing pinned."""

import json

import openai
import pytest

from model_files.resolve import resolve_model
from tests.engine.reference import reference_generate
from tests.system.processes import RunningStack, post

pytestmark = pytest.mark.system

MODEL = "smollm2-135m-instruct"
PROMPT = "The capital of France is"


def prompt_ids(text: str = PROMPT) -> list[int]:
    return list(resolve_model(MODEL).tokenizer().encode(text).ids)


def generated_ids(prompt: list[int], num_tokens: int) -> list[int]:
    return reference_generate(resolve_model(MODEL), prompt, num_tokens)


def decode(token_ids: list[int]) -> str:
    return str(resolve_model(MODEL).tokenizer().decode(token_ids, skip_special_tokens=True))


def prompt_before_eos() -> list[int]:
    """A prompt whose first greedy token is EOS: a chat and the model's whole answer to it."""
    files = resolve_model(MODEL)
    chat = "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n"
    prompt = list(files.tokenizer().encode(chat).ids)
    answer = reference_generate(files, prompt, 60)
    (eos,) = files.config().eos_token_ids[:1]
    return prompt + answer[: answer.index(eos)]


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_max_tokens_gives_exactly_that_many(stack: RunningStack, num_tokens: int) -> None:
    prompt = prompt_ids()
    with stack.client() as client:
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=num_tokens, temperature=0)
    assert answer.choices[0].text == decode(generated_ids(prompt, num_tokens))
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == num_tokens
    assert answer.usage.prompt_tokens == len(prompt)
    stack.wait_until_nothing_is_pinned()


def test_eos_as_the_very_first_token_is_an_empty_answer(stack: RunningStack) -> None:
    prompt = prompt_before_eos()
    with stack.client() as client:
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=20, temperature=0)
    assert answer.choices[0].text == ""
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1
    stack.wait_until_nothing_is_pinned()


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_across_the_first_and_second_token(stack: RunningStack, stream: bool) -> None:
    prompt = prompt_ids()
    first, second = (decode(generated_ids(prompt, 2)[i : i + 1]) for i in (0, 1))
    stop = first[-2:] + second[:2]
    request = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 20,
        "temperature": 0,
        "stop": [stop],
        "stream": stream,
    }
    response = post(stack.url + "/v1/completions", request)
    if stream:
        chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    else:
        (choice,) = response.json()["choices"]
        text, reasons = choice["text"], [choice["finish_reason"]]
    assert (text, reasons) == (first[:-2], ["stop"])
    stack.wait_until_nothing_is_pinned()


def test_prompt_of_one_token(stack: RunningStack) -> None:
    with stack.client() as client:
        answer = client.completions.create(model=MODEL, prompt=[42], max_tokens=5, temperature=0)
    assert answer.choices[0].text == decode(generated_ids([42], 5))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, 5)
    stack.wait_until_nothing_is_pinned()


def test_streamed_chat_equals_the_same_chat_in_one_piece(stack: RunningStack) -> None:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [
        {"role": "user", "content": "What is the capital of France?"}
    ]
    with stack.client() as client:
        whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=20, temperature=0)
        stream = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert "Paris" in text
    said, cold = chunks[-1].usage, whole.usage
    assert said is not None
    assert cold is not None
    # The second one finds the prompt of the first cached.
    assert (said.prompt_tokens, said.completion_tokens) == (cold.prompt_tokens, cold.completion_tokens)
    assert said.total_tokens == cold.total_tokens


def test_the_same_seed_gives_the_same_sampled_text_and_another_seed_another(stack: RunningStack) -> None:
    def sample(client: openai.OpenAI, seed: int) -> str:
        answer = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=24, temperature=1.0, seed=seed
        )
        return answer.choices[0].text

    with stack.client() as client:
        assert sample(client, 7) == sample(client, 7)
        assert sample(client, 7) != sample(client, 8)


def test_logprobs_cover_every_token_the_first_one_included(stack: RunningStack) -> None:
    with stack.client() as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=4,
            temperature=0,
            logprobs=True,
            top_logprobs=2,
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 2
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0.0
