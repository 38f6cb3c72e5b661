"""Structure, penalties and drafts through real processes and a real model."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import openai
import pytest

from tests.system.processes import RunningStack, ServiceProcess

pytestmark = pytest.mark.system

MODEL = "smollm2-135m-instruct"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["capital", "village"]},
    },
    "required": ["city", "population", "kind"],
    "additionalProperties": False,
}
LINES = "".join(f"{i}. The quick brown fox jumps over the lazy dog.\n" for i in range(1, 7)) + "7. The quick"


@pytest.fixture(scope="module")
def drafting_stack() -> Iterator[RunningStack]:
    with RunningStack(dtype="fp32", max_num_batched_tokens=64, speculative="ngram") as stack:
        yield stack


def metric(service: ServiceProcess, name: str) -> float:
    lines = httpx.get(service.url + "/metrics", timeout=5.0).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


def ask(stack: RunningStack, schema: dict[str, Any]) -> Any:
    with stack.client() as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Describe Paris as JSON."}],
            max_tokens=60,
            seed=5,
            response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
        )
    assert answer.choices[0].finish_reason == "stop"
    return json.loads(answer.choices[0].message.content or "")


def test_an_answer_fits_its_schema_and_is_the_same_with_drafts(
    stack: RunningStack, drafting_stack: RunningStack
) -> None:
    answers = [ask(running, SCHEMA) for running in (stack, drafting_stack)]
    assert jsonschema_rs.Draft202012Validator(SCHEMA).is_valid(answers[0])
    assert answers[1] == answers[0]


def test_a_schema_that_cannot_be_obeyed_is_a_bad_request(stack: RunningStack) -> None:
    with pytest.raises(openai.BadRequestError, match="'uniqueItems' is not supported"):
        ask(stack, {"type": "array", "uniqueItems": True})
    stack.wait_until_nothing_is_pinned()


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 3, "frequency_penalty": 0.7}])
def test_drafts_change_nothing_but_the_number_of_steps(
    stack: RunningStack, drafting_stack: RunningStack, options: dict[str, Any]
) -> None:
    texts = []
    for running in (stack, drafting_stack):
        with running.client() as client:
            answer = client.completions.create(model=MODEL, prompt=LINES, max_tokens=16, **options)
        texts.append(answer.choices[0].text)
    assert texts[1] == texts[0]
    assert metric(drafting_stack.completion, "tandem_engine_accepted_tokens_total") > 0
    assert metric(drafting_stack.prompt, "tandem_engine_drafted_tokens_total") == 0
    assert metric(stack.completion, "tandem_engine_drafted_tokens_total") == 0
