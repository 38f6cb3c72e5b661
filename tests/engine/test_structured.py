"""Structured output: what is asked for is what comes out, or it is refused at once."""

import gzip
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from tokenizers import Tokenizer

from engine.compilers import NUM_THREADS
from engine.errors import GrammarError
from engine.grammars import COMPILE_LIMIT_S, MAX_WAITING, NUM_KEPT, Grammars
from engine.ipc import AddRequest
from engine.json_schemas import UnsupportedSchema, narrowed_schema
from shared_scheduler import Sequence, SequenceStatus
from tests.engine.grammar_tokenizer import (
    EOS,
    VOCAB_SIZE,
    text_of,
    tiny_grammars,
    tiny_tokenizer,
    vocabulary,
)
from tests.engine.pair import TestEngine, answer_id, tiny_checkpoint
from tests.engine.tiny_engine import (
    DirectPair,
    Request,
    TinyModel,
    ToldDrafter,
    answers_alone,
    normal_engine,
)
from wire.sampling import SamplingParams, StructuredOutput, StructureKind

SUITE = Path(__file__).parents[1] / "data" / "json_schemas" / "suite_sample.jsonl.gz"
DEADLINE_S = 60.0


def suite() -> Iterator[dict[str, Any]]:
    with gzip.open(SUITE, "rt") as lines:
        yield from map(json.loads, lines)


def can_be_obeyed(group: dict[str, Any]) -> bool:
    try:
        narrowed_schema(json.dumps(group["schema"]))
    except UnsupportedSchema:
        return False
    return True


OBEYED = [group for group in suite() if can_be_obeyed(group)]
REFUSED = [group for group in suite() if not can_be_obeyed(group)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel.load(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return tiny_grammars()


def request(request_id: str, kind: StructureKind, value: str = "", **fields: Any) -> AddRequest:
    """Biased towards an early end: a random model would stay inside a text for ever."""
    closing = tuple((i, 12.0) for i, text in enumerate(vocabulary()) if text in ('"', "}", "]", "</s>"))
    sampling = SamplingParams(
        **{
            "max_tokens": 90,
            "logit_bias": closing,
            "structured": StructuredOutput(kind=kind, value=value),
            **fields,
        }
    )
    return AddRequest(request_id=request_id, prompt_token_ids=(5, 6, 7), sampling=sampling)


def run(engine: TestEngine, *requests: AddRequest) -> None:
    for message in requests:
        engine.engine.add(message)
    deadline_s = time.monotonic() + DEADLINE_S
    while not all(engine.has_ended(message.request_id) for message in requests):
        assert time.monotonic() < deadline_s
        engine.turn()


@dataclass(frozen=True, slots=True)
class Case:
    kind: StructureKind
    value: str
    pattern: str


CASES = (
    Case("regex", r"[ab]{2,4}-(cd)+", r"[ab]{2,4}-(cd)+"),
    Case("choice", '["true", "a \\"quoted\\" one", "[]"]', r'true|a "quoted" one|\[\]'),
    Case("ebnf", 'root ::= "ab" root | "."', r"(ab)*\."),
)


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
def test_the_answer_has_the_form_asked_for(
    model: TinyModel, grammars: Grammars, case: Case, num_draft_tokens: int
) -> None:
    engine = normal_engine(model.runner(64), grammars=grammars, num_draft_tokens=num_draft_tokens)
    requests = [request(str(seed), case.kind, case.value, seed=seed) for seed in range(4)]
    run(engine, *requests)
    for message in requests:
        answer = engine.answers[message.request_id]
        assert answer.end is not None
        if answer.end.finish_reason == "stop":
            assert answer.token_ids[-1] == EOS
            assert re.fullmatch(case.pattern, text_of(answer.token_ids))


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_every_answer_through_the_pair_fits_its_schema(
    model: TinyModel, grammars: Grammars, num_draft_tokens: int
) -> None:
    """Schemas of the JSON-Schema-Test-Suite that can be obeyed, and free objects."""
    pair = DirectPair(
        model.runner(512),
        model.runner(512),
        overlap=False,
        grammars=grammars,
        num_draft_tokens=num_draft_tokens,
    )
    schemas = {str(i): group["schema"] for i, group in enumerate(OBEYED)}
    for name, schema in schemas.items():
        pair.add(request(name, "json_schema", json.dumps(schema), seed=int(name)))
    pair.add(request("object", "json_object"))
    schemas["object"] = {"type": "object"}
    refused, deadline_s = set[str](), time.monotonic() + DEADLINE_S
    while len(refused) + len(pair.completion.ended - refused) < len(schemas):
        assert time.monotonic() < deadline_s
        pair.turn()
        refused |= {name for name, a in pair.prompt.answers.items() if a.end and a.end.failure}
    assert len(refused) <= 2, "known to the grammar library but for their content"
    ends = {name: pair.answer(name).end for name in schemas.keys() - refused}
    finished = [name for name, end in ends.items() if end is not None and end.finish_reason == "stop"]
    assert len(finished) > 0.8 * len(schemas)
    for name in finished:
        answer = json.loads(text_of(pair.answer(name).token_ids))
        assert jsonschema_rs.Draft202012Validator(schemas[name]).is_valid(answer), (schemas[name], answer)


def test_no_instance_that_a_schema_forbids_is_accepted(grammars: Grammars) -> None:
    from xgrammar import GrammarMatcher

    num_checked = 0
    for group in OBEYED:
        future = grammars.compile(
            StructuredOutput(kind="json_schema", value=json.dumps(group["schema"], ensure_ascii=False))
        )
        if future.exception() is not None:
            continue
        for test in group["tests"]:
            matcher = GrammarMatcher(future.result().compiled, terminate_without_stop_token=True)
            text = json.dumps(test["data"], ensure_ascii=False)
            if matcher.accept_string(text) and matcher.is_completed():
                assert test["valid"], (group["description"], text)
                num_checked += 1
    assert num_checked > 50


@pytest.mark.parametrize("group", REFUSED, ids=lambda group: f"{group['file']}, {group['description']}"[:50])
def test_a_schema_that_cannot_be_obeyed_is_refused_by_its_place(group: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedSchema, match=r"^#.*: "):
        narrowed_schema(json.dumps(group["schema"]))


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("json_schema", '{"type": "object"', "not JSON"),
        ("json_schema", "[]", "a schema is an object"),
        ("json_schema", '{"contains": {}}', "#: the keyword 'contains' is not supported"),
        ("json_schema", '{"enum": []}', "enum"),
        ("regex", "(ab", "json|regex|parenthes"),
        ("choice", "[]", "JSON list"),
        ("choice", "yes", "not JSON"),
        ("ebnf", 'rule ::= "a"', "root"),
    ],
)
def test_what_is_no_structure_is_refused_with_a_400(
    model: TinyModel, grammars: Grammars, kind: StructureKind, value: str, reason: str
) -> None:
    engine = normal_engine(model.runner(16), grammars=grammars)
    run(engine, request("a", kind, value))
    end = engine.answers["a"].end
    assert end is not None
    assert end.failure is not None
    assert end.failure.status == 400
    assert re.search(reason, end.failure.error.message, re.IGNORECASE), end.failure.error.message


def test_a_prompt_in_front_of_a_new_grammar_does_not_wait_for_it(
    model: TinyModel, grammars: Grammars
) -> None:
    """Requests without a structure are served while one compiles; a client that leaves is forgotten."""
    engine = normal_engine(model.runner(64), grammars=grammars)
    big = json.dumps({"type": "object", "properties": {f"p{i}": {"type": "number"} for i in range(300)}})
    engine.engine.add(request("slow", "json_schema", big))
    engine.engine.abort("slow")
    plain = AddRequest(request_id="b", prompt_token_ids=(5,), sampling=SamplingParams(max_tokens=3))
    run(engine, plain)
    run(engine, request("c", "choice", '["ab"]'))
    assert "slow" not in engine.answers
    assert text_of(engine.answers["c"].token_ids) == "ab"


class NeverReady(Grammars):
    def compile(self, structured: StructuredOutput) -> "Future[Any]":
        return Future()


def test_nobody_waits_for_a_grammar_longer_than_the_limit(model: TinyModel) -> None:
    now_s = 0.0
    grammars = NeverReady(tiny_tokenizer, VOCAB_SIZE, (EOS,))
    engine = normal_engine(model.runner(16), grammars=grammars, clock=lambda: now_s)
    engine.engine.add(request("a", "regex", "a"))
    engine.turn()
    assert not engine.has_ended("a")
    now_s = COMPILE_LIMIT_S
    engine.turn()
    end = engine.answers["a"].end
    assert end is not None
    assert end.failure is not None
    assert "more than 30 s" in end.failure.error.message


def test_a_token_that_the_grammar_does_not_allow_fails_the_request(
    model: TinyModel, grammars: Grammars
) -> None:
    """As when a prompt engine that knows no grammar hands over a first token."""
    engine = normal_engine(model.runner(64), grammars=grammars)
    message = request("a", "choice", '["ab"]')
    engine.engine.add(message)
    while engine.scheduler.get("a") is None:
        engine.turn()
    sequence = engine.scheduler.get("a")
    assert isinstance(sequence, Sequence)
    sequence.append_token(9)
    while not engine.has_ended("a"):
        engine.turn()
    assert sequence.status is SequenceStatus.FINISHED_SO_FAILED
    end = engine.answers["a"].end
    assert end is not None
    assert end.finish_reason == "structured_output_failed"
    assert engine.is_drained


DEAD_END = ("a", "!", "b", "!", "a")
"""Texts of single tokens, which a grammar wants to be followed by what no text is."""


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_a_grammar_that_allows_no_token_fails_its_request_alone(
    model: TinyModel, grammars: Grammars, temperature: float, overlap: bool, num_draft_tokens: int
) -> None:
    plain = Request("plain", (5, 6, 7), SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True))
    expected = answers_alone(model, [plain])
    told = {"dead": [vocabulary().index(text) for text in DEAD_END] + [0] * 90, **expected}
    engine = normal_engine(
        model.runner(64),
        grammars=grammars,
        overlap=overlap,
        num_draft_tokens=num_draft_tokens,
        drafter=ToldDrafter(told, 3),
    )
    dead = request("dead", "regex", "".join(DEAD_END) + r"[^\s\S]", temperature=temperature)
    run(engine, dead, plain.message())
    end = engine.answers["dead"].end
    assert end is not None
    assert end.finish_reason == "structured_output_failed"
    assert "".join(DEAD_END).startswith(text_of(engine.answers["dead"].token_ids))
    assert engine.answers["plain"].token_ids == expected["plain"]
    while engine.engine.has_work:
        engine.turn()
    assert engine.is_drained


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prompt_engine_hands_no_token_over_that_its_grammar_does_not_allow(
    model: TinyModel, grammars: Grammars, temperature: float, num_choices: int
) -> None:
    pair = DirectPair(model.runner(64), model.runner(64), overlap=False, grammars=grammars)
    dead = request("a", "ebnf", "root ::= root", temperature=temperature)
    pair.prompt.engine.add(msgspec.structs.replace(dead, num_completions=num_choices))
    while not pair.prompt.has_ended("a"):
        pair.prompt.turn()
    end = pair.prompt.answers["a"].end
    assert end is not None
    assert end.finish_reason == "structured_output_failed"
    assert not pair.prompt.answers["a"].token_ids
    assert pair.num_offers == 0
    assert pair.prompt.is_drained


def test_a_sequence_with_a_structure_is_ended_rather_than_computed_again(
    model: TinyModel, grammars: Grammars
) -> None:
    engine = normal_engine(model.runner(9), grammars=grammars, stop_preempted_request=False)
    grammars.compile(StructuredOutput(kind="regex", value="(ab|cd){30}")).result()
    both = [request(name, "regex", "(ab|cd){30}", max_tokens=24) for name in "ab"]
    run(engine, *both)
    reasons = [answer.end.finish_reason for answer in engine.answers.values() if answer.end]
    assert sorted(map(str, reasons)) == ["insufficient_system_resource", "length"]


def test_grammars_are_kept_and_the_oldest_go(grammars: Grammars) -> None:
    def structure(i: int) -> StructuredOutput:
        return StructuredOutput(kind="choice", value=json.dumps([f"kept {i}"]))

    first = grammars.compile(structure(0))
    assert grammars.compile(structure(0)) is first
    for i in range(1, NUM_KEPT + 1):
        grammars.compile(structure(i)).result()
    assert grammars.compile(structure(0)) is not first
    with pytest.raises(GrammarError):
        grammars.compile(StructuredOutput(kind="choice", value="[]")).result()


@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_step_never_compiles(
    model: TinyModel, grammars: Grammars, monkeypatch: pytest.MonkeyPatch, num_choices: int
) -> None:
    """Not even where a grammar is kept no more when its sequence, or a fork of it, takes its first step."""
    engine = normal_engine(model.runner(64), grammars=grammars)
    message = request("a", "regex", "(ab|cd){4}")
    engine.engine.add(msgspec.structs.replace(message, num_completions=num_choices))
    deadline_s = time.monotonic() + DEADLINE_S
    while engine.scheduler.get("a") is None:
        assert time.monotonic() < deadline_s
        engine.engine.poll()
    for i in range(NUM_KEPT):
        grammars.compile(StructuredOutput(kind="choice", value=json.dumps([f"crowd {i}"]))).result()
    monkeypatch.setattr(grammars, "compile", None)
    while not engine.has_ended("a"):
        engine.turn()
    for choice in range(num_choices):
        answer = engine.answers[answer_id("a", choice)]
        assert re.fullmatch("(ab|cd){4}", text_of(answer.token_ids))


@pytest.fixture
def busy_grammars() -> Iterator[Grammars]:
    """Their threads wait inside a tokenizer until the test is over."""
    may_go_on = threading.Event()

    def tokenizer() -> Tokenizer:
        assert may_go_on.wait(DEADLINE_S)
        return tiny_tokenizer()

    grammars = Grammars(tokenizer, VOCAB_SIZE, (EOS,))
    begun = [grammars.compile(StructuredOutput(kind="regex", value=f"begun{i}")) for i in range(NUM_THREADS)]
    while not all(future.running() for future in begun):
        time.sleep(0.001)
    yield grammars
    may_go_on.set()
    grammars.close()


@pytest.mark.parametrize("leaves_by", ["abort", "limit"])
def test_a_grammar_that_nobody_waits_for_any_more_is_not_compiled(
    model: TinyModel, busy_grammars: Grammars, leaves_by: str
) -> None:
    now_s = 0.0
    engine = normal_engine(model.runner(16), grammars=busy_grammars, clock=lambda: now_s)
    for name in "ab":
        engine.engine.add(request(name, "regex", "x"))
    waiting = busy_grammars.compile(StructuredOutput(kind="regex", value="x"))
    engine.engine.abort("a")
    assert not waiting.cancelled()
    if leaves_by == "abort":
        engine.engine.abort("b")
    else:
        now_s = COMPILE_LIMIT_S
        engine.turn()
        assert engine.has_ended("b")
    assert waiting.cancelled()
    assert busy_grammars.compile(StructuredOutput(kind="regex", value="x")) is not waiting


def test_a_grammar_that_a_thread_has_begun_is_kept_for_who_asks_again(
    model: TinyModel, busy_grammars: Grammars
) -> None:
    begun = busy_grammars.compile(StructuredOutput(kind="regex", value="begun0"))
    engine = normal_engine(model.runner(16), grammars=busy_grammars)
    engine.engine.add(request("a", "regex", "begun0"))
    engine.engine.abort("a")
    assert busy_grammars.compile(StructuredOutput(kind="regex", value="begun0")) is begun


def test_a_structure_behind_too_many_others_is_refused_until_one_leaves(
    model: TinyModel, busy_grammars: Grammars
) -> None:
    engine = normal_engine(model.runner(16), grammars=busy_grammars)
    for i in range(MAX_WAITING + 1):
        engine.engine.add(request(str(i), "regex", f"x{i}"))
    engine.turn()
    end = engine.answers[str(MAX_WAITING)].end
    assert end is not None
    assert end.failure is not None
    assert (end.failure.status, end.failure.error.code) == (503, "grammar_queue_full")
    engine.engine.abort("0")
    engine.engine.add(request("again", "regex", f"x{MAX_WAITING}"))
    engine.turn()
    assert engine.ended == {str(MAX_WAITING)}
