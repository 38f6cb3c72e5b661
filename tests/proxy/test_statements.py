"""Statements about whole streams: how each of them ends (P7); a pair answers as one engine does (P8)."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.proxy.builders import Answering, Stack, events, ids, pair_stack, stack
from tests.proxy.mock_engines import Call, MockEngine
from tests.proxy.test_fields import ASKS
from tests.proxy.test_tools import CALL, FORCED, TIME, WEATHER, roomy_stack
from wire.services import CompletionEvent, OutputToken, PromptChoice, TokenLogprobs

ENDINGS: list[tuple[str, dict[str, Any], str]] = [
    ("done", {}, "stop"),
    ("cut off", {"engine_says": "length"}, "length"),
    ("stop here", {"stop": ["here"]}, "stop"),
    (CALL, {"tools": [WEATHER]}, "tool_calls"),
    (FORCED, {"tools": [WEATHER, TIME], "tool_choice": "required"}, "tool_calls"),
    ('{"city": "Bern"}', {"tools": [WEATHER], "parallel_tool_calls": False}, "stop"),
]


@pytest.mark.parametrize(("text", "fields", "reason"), ENDINGS)
async def test_p7_every_stream_ends_with_one_finish_reason_and_done(
    text: str, fields: dict[str, Any], reason: str
) -> None:
    fields = dict(fields)
    engine_says = fields.pop("engine_says", "stop")
    async with roomy_stack(text) as running:
        for engine in running.engines:
            script = Answering(text, finish_reason=engine_says)
            engine.script = script.prompt if engine.role == "prompt" else script.completion
        *chunks, done = events((await running.chat(stream=True, **fields)).text)
    reasons = [choice["finish_reason"] for chunk in chunks for choice in json.loads(chunk)["choices"]]
    assert done == "[DONE]"
    assert [each for each in reasons if each is not None] == [reason]
    assert reasons[-1] == reason


@pytest.mark.parametrize("reason", ["error", "abort", "insufficient_system_resource"])
async def test_p7_a_stream_that_breaks_ends_with_an_error_and_done(reason: Any) -> None:
    async def completion(call: Call) -> None:
        await call.accept()
        await call.tokens(1, ids("b"), finish_reason=reason)
        await call.end()

    first = Answering("a", finish_reason=None)
    async with pair_stack(first.prompt, completion, max_migrations=0) as running:
        *chunks, error, done = events((await running.chat(stream=True)).text)
    assert done == "[DONE]"
    assert list(json.loads(error)) == ["error"]
    assert all(json.loads(chunk)["choices"][0]["finish_reason"] is None for chunk in chunks)


def output(index: int, token_id: int) -> OutputToken:
    """A token with logprobs that depend on it alone."""
    logprobs = TokenLogprobs(logprob=-0.5, top_token_ids=(token_id, 3), top_logprobs=(-0.5, -1.5))
    return OutputToken(index=index, token_id=token_id, logprobs=logprobs)


class Model:
    """The same tokens for every choice, whichever engine is asked."""

    def __init__(self, text: str) -> None:
        self.tokens = [output(index, token_id) for index, token_id in enumerate(Answering(text).ids)]

    async def prompt(self, call: Call) -> None:
        choices = [PromptChoice(token=self.tokens[0])] * call.prompt_request.num_completions
        await call.first_tokens(*choices, num_cached_tokens=2)

    async def completion(self, call: Call) -> None:
        await self._write(call, first_index=1)

    async def normal(self, call: Call) -> None:
        await self._write(call, first_index=0)

    async def _write(self, call: Call, first_index: int) -> None:
        await call.accept()
        for token in self.tokens[first_index:]:
            for choice in range(call.completion_request.num_completions):
                reason = "stop" if token is self.tokens[-1] else None
                cached = 2 if first_index == 0 else None
                event = CompletionEvent(
                    choice=choice, tokens=(token,), finish_reason=reason, num_cached_tokens=cached
                )
                await call.event(event)
        await call.end()


async def answer_of(running: Stack, path: str, fields: dict[str, Any]) -> Any:
    response = await running.client.post(path, json={"model": "tiny", **ASKS[path], **fields})
    assert response.status_code == 200, response.text
    return without_ids(response.json())


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        hidden = ("id", "call_id", "created", "created_at")
        return {key: without_ids(item) for key, item in value.items() if key not in hidden}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@pytest.mark.parametrize(
    ("path", "text", "fields"),
    [
        (CHAT, "Grüße 🙂", {"logprobs": True, "top_logprobs": 2, "n": 3}),
        (TEXT, "Grüße 🙂 שלום", {"logprobs": 2, "n": 2, "stop": ["לו"]}),
        (CHAT, f"Wait. {CALL}", {"tools": [WEATHER], "n": 2}),
        (CHAT, FORCED, {"tools": [WEATHER, TIME], "tool_choice": "required"}),
        (CHAT, '{"a": 1}', {"response_format": {"type": "json_object"}, "logprobs": True}),
        (RESPONSES, CALL, {"tools": [{"type": "function", **WEATHER["function"]}]}),
    ],
)
async def test_p8_a_pair_answers_as_one_engine_does(path: str, text: str, fields: dict[str, Any]) -> None:
    model = Model(text)
    pair = MockEngine("prompt", model.prompt), MockEngine("completion", model.completion)
    alone = MockEngine("normal", model.normal)
    answers, asked = [], []
    for engines in (pair, (alone,)):
        for engine in engines:
            engine.info = replace(engine.info, max_model_len=4096)
        async with stack(*engines) as running:
            answers.append(await answer_of(running, path, {**fields, "seed": 7}))
            asked += [engine.calls[0] for engine in engines]
    assert answers[0] == answers[1]
    prompt, completion, normal = asked
    assert prompt.prompt_request.sampling == completion.completion_request.sampling
    assert drawn(normal) == drawn(completion)


def drawn(call: Call) -> Any:
    """What is drawn; the room that is left differs between a pair and an engine alone."""
    return replace(call.completion_request.sampling, max_tokens=1)
