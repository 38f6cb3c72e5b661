"""Every way to draw in one batch gives each request what it gets alone, in fp32."""

from dataclasses import dataclass
from typing import Any

import pytest

from engine.grammars import Grammars
from engine.ipc import AddRequest
from tests.engine.grammar_tokenizer import EOS, text_of, tiny_grammars
from tests.engine.pair import TestEngine, answer_id, tiny_checkpoint
from tests.engine.tiny_engine import DirectPair, TinyModel, normal_engine
from wire.sampling import SamplingParams, StructuredOutput

SCHEMA = StructuredOutput(
    kind="json_schema",
    value='{"type":"object","properties":{"a":{"enum":[1,2]},"b":{"type":"boolean"}},"required":["a","b"]}',
)
CHOICE = StructuredOutput(kind="choice", value='["true", "false", "nu"]')
WISHES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "max_tokens": 40},
    {"seed": 11},
    {"seed": 12, "top_k": 7, "top_p": 0.8},
    {"seed": 13, "min_p": 0.2, "prompt_logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.6},
    {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"seed": 14, "repetition_penalty": 1.3, "presence_penalty": -1.0},
    {"temperature": 0.0, "logit_bias": ((7, 100.0), (9, -100.0))},
    {"seed": 15, "temperature": 2.0, "min_tokens": 20, "logit_bias": ((EOS, 60.0),)},
    {"temperature": 0.0, "structured": SCHEMA, "max_tokens": 60},
    {"seed": 16, "structured": SCHEMA, "max_tokens": 60, "logprobs": 2},
    {"seed": 17, "structured": CHOICE, "n": 3},
    {"seed": 18, "n": 3, "frequency_penalty": 1.0, "prompt_logprobs": 0},
    {"seed": 19, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 0, "repetition_penalty": 1.2, "stop_token_ids": (30, 31)},
)


@dataclass(frozen=True, slots=True)
class Mixed:
    model: TinyModel
    grammars: Grammars
    alone: dict[str, list[int]]


def messages() -> list[AddRequest]:
    requests = []
    for i, wish in enumerate(WISHES):
        fields = {"max_tokens": 24, **wish}
        n = fields.pop("n", 1)
        prompt = tuple(3 + (7 * i + j * j) % 120 for j in range(3 + 2 * i % 13))
        sampling = SamplingParams(**fields)
        requests.append(
            AddRequest(request_id=str(i), prompt_token_ids=prompt, sampling=sampling, num_completions=n)
        )
    return requests


def run(engine: TestEngine, requests: list[AddRequest]) -> dict[str, list[int]]:
    for request in requests:
        engine.engine.add(request)
    while not all(engine.has_ended(request.request_id) for request in requests):
        engine.turn()
    return {name: answer.token_ids for name, answer in engine.answers.items()}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    model, grammars = TinyModel.load(tiny_checkpoint(tmp_path_factory.mktemp("tiny"))), tiny_grammars()
    alone: dict[str, list[int]] = {}
    for request in messages():
        alone |= run(normal_engine(model.runner(96), grammars=grammars), [request])
    return Mixed(model, grammars, alone)


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_sixteen_mixed_requests_in_one_batch_get_what_each_gets_alone(
    mixed: Mixed, overlap: bool, num_draft_tokens: int
) -> None:
    engine = normal_engine(
        mixed.model.runner(256),
        grammars=tiny_grammars(),
        max_num_seqs=24,
        overlap=overlap,
        num_draft_tokens=num_draft_tokens,
    )
    assert run(engine, messages()) == mixed.alone
    while not engine.is_drained:
        engine.turn()
    engine.engine.close()


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_the_pair_gives_the_same(mixed: Mixed, num_draft_tokens: int) -> None:
    """The prompt engine draws first tokens by the same rules; the completion engine replays them."""
    pair = DirectPair(
        mixed.model.runner(256),
        mixed.model.runner(256),
        overlap=False,
        grammars=mixed.grammars,
        num_draft_tokens=num_draft_tokens,
    )
    for request in messages():
        pair.add(request)
    while not pair.is_drained:
        pair.turn()
    answers = {
        answer_id(request.request_id, choice): pair.answer(answer_id(request.request_id, choice)).token_ids
        for request in messages()
        for choice in range(request.num_completions)
    }
    assert answers == mixed.alone


@pytest.mark.parametrize("overlap", [False, True])
def test_a_sequence_that_is_computed_again_keeps_its_penalties(mixed: Mixed, overlap: bool) -> None:
    engine = normal_engine(
        mixed.model.runner(20), grammars=mixed.grammars, overlap=overlap, stop_preempted_request=False
    )
    requests = [r for r in messages() if r.sampling.structured is None and r.num_completions == 1]
    answers = run(engine, requests)
    assert answers == {request.request_id: mixed.alone[request.request_id] for request in requests}


def test_each_wish_is_heard(mixed: Mixed) -> None:
    """The answers above are not equal because nothing had an effect."""
    alone = mixed.alone
    assert set(alone["8"]) == {7}
    assert EOS not in alone["9"][:20]
    assert EOS in alone["9"][20:]
    for i in ("10", "11"):
        assert text_of(alone[i]).replace(" ", "").replace("\n", "") in {
            f'{{"a":{a},"b":{b}}}' for a in (1, 2) for b in ("true", "false")
        }
    assert {text_of(alone[answer_id("12", choice)]) for choice in range(3)} <= {"true", "false", "nu"}
    assert len(set(alone["5"])) > 0.8 * len(alone["5"])
