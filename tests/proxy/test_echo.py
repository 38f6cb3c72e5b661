"""An echoed prompt with the log probabilities of its tokens, as evaluation harnesses ask for it."""

import json
from typing import Any

import pytest

from tests.proxy.builders import Stack, events, ids, pair_stack, stack
from tests.proxy.mock_engines import Call, MockEngine
from wire.services import CompletionEvent, OutputToken, TokenLogprobs

PROMPT = "hüa"
"""Four tokens of a byte each; the second character is two of them."""
JUDGED = tuple(
    TokenLogprobs(logprob=-float(place), top_token_ids=tuple(ids("z")), top_logprobs=(-0.25,))
    for place in range(1, 4)
)
ANSWER = tuple(
    OutputToken(index=index, token_id=token_id, logprobs=TokenLogprobs(logprob=-0.5))
    for index, token_id in enumerate(ids("xy"))
)
OF_PROMPT = {
    "tokens": ["h", "\ufffd", "\ufffd", "a"],
    "token_logprobs": [None, -1.0, -2.0, -3.0],
    "top_logprobs": [
        None,
        {"z": -0.25, "\ufffd": -1.0},
        {"z": -0.25, "\ufffd": -2.0},
        {"z": -0.25, "a": -3.0},
    ],
    "text_offset": [0, 1, 1, 2],
}


async def prompt(call: Call) -> None:
    await call.first_token(ANSWER[0].token_id, logprobs=ANSWER[0].logprobs, prompt_logprobs=JUDGED)


async def completion(call: Call) -> None:
    await call.accept()
    await call.event(CompletionEvent(tokens=ANSWER[1:], finish_reason="length"))
    await call.end()


async def normal(call: Call) -> None:
    await call.accept()
    for choice in range(call.completion_request.num_completions):
        await call.event(CompletionEvent(choice=choice, tokens=ANSWER[:1], prompt_logprobs=JUDGED))
        await call.event(CompletionEvent(choice=choice, tokens=ANSWER[1:], finish_reason="length"))
    await call.end()


def normal_stack(*, has_link: bool = False) -> Any:
    return stack(MockEngine("normal", normal, has_link=has_link))


async def echoed(running: Stack, **fields: object) -> list[dict[str, Any]]:
    response = await running.complete(prompt=PROMPT, echo=True, logprobs=1, **fields)
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


async def test_prompt_and_answer_are_one_list_of_tokens() -> None:
    async with pair_stack(prompt, completion) as running:
        (choice,) = await echoed(running)
    assert choice["text"] == "hüaxy"
    assert choice["logprobs"] == {
        "tokens": [*OF_PROMPT["tokens"], "x", "y"],
        "token_logprobs": [*OF_PROMPT["token_logprobs"], -0.5, -0.5],
        "top_logprobs": [*OF_PROMPT["top_logprobs"], {"x": -0.5}, {"y": -0.5}],
        "text_offset": [*OF_PROMPT["text_offset"], 3, 4],
    }
    assert running.engines[0].calls[0].prompt_request.sampling.prompt_logprobs == 1


@pytest.mark.parametrize("has_link", [False, True])
async def test_a_normal_engine_answers_the_same_for_every_choice(has_link: bool) -> None:
    async with pair_stack(prompt, completion) as running:
        (expected,) = await echoed(running)
    async with normal_stack(has_link=has_link) as running:
        choices = await echoed(running, n=2)
    assert choices == [{**expected, "index": 0}, {**expected, "index": 1}]


async def test_max_tokens_0_is_the_echo_alone() -> None:
    async with pair_stack(prompt, completion) as running:
        response = await running.complete(prompt=ids(PROMPT), echo=True, logprobs=1, max_tokens=0)
        plain = await running.complete(prompt=PROMPT, echo=True, max_tokens=0)
    choice = {"index": 0, "text": PROMPT, "logprobs": OF_PROMPT, "finish_reason": "length"}
    assert response.json()["choices"] == [choice]
    assert response.json()["usage"]["completion_tokens"] == 0
    assert plain.json()["choices"] == [{**choice, "logprobs": None}]
    assert running.engines[0].calls[0].prompt_request.sampling.max_tokens == 1


async def test_a_streamed_echo_joins_to_the_whole_one() -> None:
    async with pair_stack(prompt, completion) as running:
        (whole,) = await echoed(running)
        response = await running.complete(prompt=PROMPT, echo=True, logprobs=1, stream=True)
    chunks = [json.loads(event)["choices"][0] for event in events(response.text)[:-1]]
    parts = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    joined = {name: [item for part in parts for item in part[name]] for name in whole["logprobs"]}
    assert joined == whole["logprobs"]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]


async def test_what_a_harness_computes_from_it() -> None:
    """The continuation's probability: the tokens behind the context, without the generated one."""
    async with pair_stack(prompt, completion) as running:
        (choice,) = await echoed(running, max_tokens=1, temperature=0)
    context_length = len(ids("hü"))
    logprobs = choice["logprobs"]["token_logprobs"][context_length : len(ids(PROMPT))]
    assert sum(logprobs) == -3.0


async def test_an_engine_that_does_not_answer_them_is_to_blame() -> None:
    async def silent(call: Call) -> None:
        await call.first_token(ANSWER[0].token_id, logprobs=ANSWER[0].logprobs)

    async with pair_stack(silent, completion) as running:
        response = await running.complete(prompt=PROMPT, echo=True, logprobs=1)
    assert response.status_code == 502
    assert "0 prompt logprobs where 3 were due" in response.json()["error"]["message"]
