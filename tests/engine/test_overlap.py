"""Results one step late: the same tokens, whatever arrives, leaves or is preempted meanwhile."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.pair import Answer, tiny_checkpoint
from tests.engine.tiny_engine import (
    DirectPair,
    TinyModel,
    answers_alone,
    normal_engine,
    some_requests,
)

MAX_TURNS = 3000
REQUESTS = some_requests()
PROMPT = tuple(range(3, 23))
"""Three chunks."""


@dataclass(frozen=True, slots=True)
class Reference:
    model: TinyModel
    answers: dict[str, list[int]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    model = TinyModel.load(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))
    return Reference(model, answers_alone(model, REQUESTS))


@dataclass(frozen=True, slots=True)
class History:
    """In which turns the requests arrive and, perhaps, leave."""

    arrivals: dict[str, int]
    departures: dict[str, int]


@st.composite
def histories(draw: st.DrawFn) -> History:
    ids = draw(st.lists(st.sampled_from([r.request_id for r in REQUESTS]), min_size=1, unique=True))
    arrivals = {request_id: draw(st.integers(0, 30)) for request_id in ids}
    leaving = draw(st.lists(st.sampled_from(ids), max_size=3, unique=True))
    return History(arrivals, {r: arrivals[r] + draw(st.integers(0, 25)) for r in leaving})


NORMAL_POOLS = st.integers(15, 40)
"""From room for the longest sequence alone to room for nearly all."""


@given(histories(), NORMAL_POOLS, st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_normal_engine_answers_any_history_as_if_each_request_were_alone(
    reference: Reference, history: History, num_blocks: int, overlap: bool, stop_preempted: bool
) -> None:
    normal = normal_engine(
        reference.model.runner(num_blocks), overlap=overlap, stop_preempted_request=stop_preempted
    )
    turn = 0
    while turn <= max(history.arrivals.values()) or normal.engine.has_work:
        for request in REQUESTS:
            if history.arrivals.get(request.request_id) == turn:
                normal.engine.add(request.message())
            if history.departures.get(request.request_id) == turn:
                normal.engine.abort(request.request_id)
        normal.turn()
        turn += 1
        assert turn < MAX_TURNS, "no progress"
    for request_id in history.arrivals:
        check_answer(normal.answers[request_id], reference.answers[request_id], may_be_cut=stop_preempted)
    assert normal.is_drained
    normal.engine.close()


@given(histories(), st.integers(15, 30), st.integers(18, 40), st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_pair_answers_any_history_as_if_each_request_were_alone(
    reference: Reference, history: History, prompt_blocks: int, completion_blocks: int, overlap: bool
) -> None:
    model = reference.model
    pair = DirectPair(model.runner(prompt_blocks), model.runner(completion_blocks), overlap=overlap)
    turn = 0
    while turn <= max(history.arrivals.values()) or not pair.is_drained:
        for request in REQUESTS:
            if history.arrivals.get(request.request_id) == turn:
                pair.add(request.message())
            if history.departures.get(request.request_id) == turn:
                pair.abort(request.request_id)
        pair.turn()
        turn += 1
        assert turn < MAX_TURNS, "no progress"
    for request_id in history.arrivals.keys() - history.departures.keys():
        check_answer(pair.answer(request_id), reference.answers[request_id], may_be_cut=True)
    pair.close()


def check_answer(answer: Answer, expected: list[int], *, may_be_cut: bool) -> None:
    assert answer.end is not None
    assert answer.indices == list(range(len(answer.indices)))
    assert answer.token_ids == expected[: len(answer.token_ids)]
    if answer.end.finish_reason not in ("abort", "insufficient_system_resource"):
        assert answer.token_ids == expected
    assert may_be_cut or answer.end.finish_reason != "insufficient_system_resource"
