"""Drafts: verified in one step, invisible in the answer."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.drafters import MAX_MATCH, DraftContext, PromptLookup, look_up
from engine.ipc import AddRequest
from engine.verification import verify
from shared_scheduler import Batch, Sequence
from tests.engine.pair import TestEngine, greedy, tiny_checkpoint
from tests.engine.tiny_engine import (
    DirectPair,
    Request,
    TinyModel,
    ToldDrafter,
    answers_alone,
    normal_engine,
    some_requests,
)
from wire.sampling import SamplingParams

REQUESTS = some_requests()
REPEATING = Request("r", (5, 6, 7, 8) * 4, greedy(60))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel.load(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def answers(model: TinyModel) -> dict[str, list[int]]:
    return answers_alone(model, [*REQUESTS, REPEATING])


def run(engine: TestEngine, *requests: Request, n: int = 1) -> int:
    """Turns until all are answered."""
    for request in requests:
        engine.engine.add(
            AddRequest(
                request_id=request.request_id,
                prompt_token_ids=request.prompt,
                sampling=request.sampling,
                num_completions=n,
            )
        )
    turns = 0
    while not all(engine.has_ended(request.request_id) for request in requests):
        engine.turn()
        turns += 1
    return turns


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_right_drafts_save_steps_and_wrong_ones_change_nothing(
    model: TinyModel, answers: dict[str, list[int]], num_right: int, overlap: bool
) -> None:
    """With a clock that stands still every draft costs nothing, so all are verified."""
    request = replace(REQUESTS[-1], sampling=replace(REQUESTS[-1].sampling, ignore_eos=True, max_tokens=21))
    told = answers_alone(model, [request])
    drafter = ToldDrafter(told, num_right)
    engine = normal_engine(
        model.runner(64), overlap=overlap, num_draft_tokens=3, drafter=drafter, clock=lambda: 0.0
    )
    turns = run(engine, request)
    assert engine.answers[request.request_id].token_ids == told[request.request_id]
    if not overlap:
        assert engine.engine.stats().num_accepted_tokens == {0: 0, 1: 10, 3: 15}[num_right]
        num_prompt_steps = -(-len(request.prompt) // 8)
        assert turns == num_prompt_steps + {0: 20, 1: 10, 3: 5}[num_right]


@pytest.mark.parametrize("overlap", [False, True])
def test_prompt_lookup_answers_a_batch_as_each_request_is_answered_alone(
    model: TinyModel, answers: dict[str, list[int]], overlap: bool
) -> None:
    engine = normal_engine(model.runner(128), overlap=overlap, num_draft_tokens=4)
    run(engine, *REQUESTS, REPEATING)
    assert {name: answer.token_ids for name, answer in engine.answers.items()} == answers
    assert engine.engine.stats().num_drafted_tokens > 0
    assert engine.is_drained


def test_choices_are_drafted_for_one_by_one(model: TinyModel) -> None:
    request = Request("r", (5, 6, 7, 8) * 4, SamplingParams(max_tokens=30, temperature=0.5, ignore_eos=True))
    plain, drafted = normal_engine(model.runner(64)), normal_engine(model.runner(64), num_draft_tokens=4)
    for engine in (plain, drafted):
        run(engine, request, n=3)
    tokens = [{name: a.token_ids for name, a in e.answers.items()} for e in (plain, drafted)]
    assert tokens[1] == tokens[0]
    assert drafted.engine.stats().num_drafted_tokens > 0


def test_every_accepted_token_has_its_logprobs(model: TinyModel, answers: dict[str, list[int]]) -> None:
    request = replace(REPEATING, sampling=replace(REPEATING.sampling, logprobs=2))
    outputs = []
    for num_draft_tokens in (0, 4):
        engine = normal_engine(model.runner(64), num_draft_tokens=num_draft_tokens)
        engine.engine.add(request.message())
        tokens = []
        while not engine.is_drained or engine.engine.has_work:
            engine.engine.poll()
            tokens += [token for output in engine.engine.step() for token in output.tokens]
        outputs.append(tokens)
    plain, drafted = outputs
    assert [t.token_id for t in drafted] == answers["r"]
    for one, other in zip(plain, drafted, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert other.logprobs.logprob == pytest.approx(one.logprobs.logprob, abs=1e-4)
        assert other.logprobs.top_token_ids == one.logprobs.top_token_ids


def test_a_handed_over_sequence_is_drafted_for_from_its_prompt(
    model: TinyModel, answers: dict[str, list[int]]
) -> None:
    """The completion engine has the prompt's ids, so nothing but the KV needs to be moved for it."""
    pair = DirectPair(model.runner(64), model.runner(64), overlap=False, num_draft_tokens=4)
    pair.add(REPEATING.message())
    while not pair.completion.has_ended("r"):
        pair.turn()
    assert pair.answer("r").token_ids == answers["r"]
    assert pair.completion.engine.stats().num_drafted_tokens > 0
    pair.close()


def test_acceptance_through_the_pair_is_within_2_percent_of_one_engine(model: TinyModel) -> None:
    """E8 of the failure cases. Two of three drafts are right, and a standing clock lets all be verified."""
    requests = [replace(r, sampling=replace(r.sampling, ignore_eos=True, max_tokens=61)) for r in REQUESTS]
    told = answers_alone(model, requests)
    options = {"num_draft_tokens": 3, "drafter": ToldDrafter(told, 2), "clock": lambda: 0.0}
    alone = normal_engine(model.runner(256), **options)
    run(alone, *requests)
    pair = DirectPair(model.runner(256), model.runner(256), overlap=False, **options)
    for request in requests:
        pair.add(request.message())
    while not pair.is_drained:
        pair.turn()
    assert {name: pair.answer(name).token_ids for name in told} == told
    ours, theirs = (
        stats.num_accepted_tokens / stats.num_drafted_tokens
        for stats in (pair.completion.engine.stats(), alone.engine.stats())
    )
    assert ours == pytest.approx(theirs, rel=0.02)
    pair.close()


# ----- verification


def batch(*drafts: list[int]) -> Batch:
    seqlens_q = np.array([1 + len(ids) for ids in drafts], np.int32)
    token_ids = np.array([i for ids in drafts for i in (100, *ids)], np.int32)
    none = np.empty(0, np.int32)
    return Batch(False, 4, token_ids, none, none, seqlens_q, none, none, none, none, none)


def test_a_draft_counts_if_it_and_all_before_it_are_what_is_drawn() -> None:
    drawn = np.array([5, 6, 7, 8, 1, 3, 9, 5])
    verified = verify(batch([5, 6, 9], [], [4, 9]), drawn)
    assert verified.token_ids.tolist() == [7, 1, 3]
    assert verified.accepted.tolist() == [5, 6, -1, -1, -1]
    assert verified.num_rejected.tolist() == [1, 0, 2]


@given(st.lists(st.lists(st.integers(0, 1), max_size=4), min_size=1), st.data())
def test_verification_equals_its_definition(drafts: list[list[int]], data: st.DataObject) -> None:
    num_tokens = sum(1 + len(ids) for ids in drafts)
    drawn = data.draw(st.lists(st.integers(0, 1), min_size=num_tokens, max_size=num_tokens))
    verified, at, flat = verify(batch(*drafts), np.array(drawn)), 0, 0
    for i, ids in enumerate(drafts):
        count = 0
        while count < len(ids) and ids[count] == drawn[at + count]:
            count += 1
        assert verified.token_ids[i] == drawn[at + count]
        assert verified.num_rejected[i] == len(ids) - count
        rest = [-1] * (len(ids) - count)
        assert verified.accepted[flat : flat + len(ids)].tolist() == ids[:count] + rest
        at, flat = at + 1 + len(ids), flat + len(ids)


# ----- prompt lookup


@pytest.mark.parametrize(
    ("tokens", "expected", "match_length"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2], 3),
        ([1, 2, 8, 3, 2, 9, 1, 2], [8, 3, 2], 2),
        ([2, 8, 3, 2, 9, 4, 2], [9, 4, 2], 1),
        ([7, 7], [7, 7, 7], 1),
        ([4, 5, 4, 5], [4, 5, 4], 2),
        ([1, 2, 3], [], 0),
        ([1], [], 0),
        ([1, 2, 3, 4, 5, 6, 0, 2, 3, 4, 5, 8, 1, 2, 3, 4, 5], [8, 1, 2], MAX_MATCH),
    ],
)
def test_what_followed_the_longest_and_then_latest_match(
    tokens: list[int], expected: list[int], match_length: int
) -> None:
    found, length = look_up(np.array(tokens, np.int32), 3)
    assert (found.tolist(), length) == (expected, match_length)


def running(*tokens: int) -> Sequence:
    sequence = Sequence("a", tokens, greedy(100), block_size=4)
    sequence.draft.info_slot = 0
    return sequence


def test_confidence_follows_what_came_of_the_guesses() -> None:
    """Whether they were verified or not; a new sequence starts with what is known of the others."""
    lookup, sequence = PromptLookup(2), running(1, 2)
    for token in [1, 2] * 20:
        sequence.append_token(token)
        (drafts,) = lookup.propose([DraftContext(sequence)], 2)
    assert drafts.token_ids == (1, 2)
    assert min(drafts.confidences) > 0.8
    other = running(*[1, 2] * 4)
    other.draft.info_slot = 1
    assert min(lookup.propose([DraftContext(other)], 2)[0].confidences) > 0.8
    for token in range(3, 60):
        sequence.append_token(token)
        sequence.append_token(1)
        (drafts,) = lookup.propose([DraftContext(sequence)], 2)
    assert drafts.confidences[0] < 0.2


def test_behind_a_token_in_flight_the_chance_includes_that_of_the_token() -> None:
    lookup, sequence = PromptLookup(1), running(*range(10), *range(10), 0, 1, 2)
    (known,) = lookup.propose([DraftContext(sequence)], 2)
    (unknown,) = lookup.propose([DraftContext(sequence, (3, 4))], 2)
    assert known.token_ids == (3, 4)
    assert unknown.token_ids == (6, 7)
    assert unknown.confidences[0] < known.confidences[0]
    assert unknown.confidences[1] == known.confidences[1]
