"""Results one step late, several tokens a step: the same tokens, whatever arrives, leaves or is preempted."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelOutputError
from tests.engine.pair import Answer, TestEngine, greedy, tiny_checkpoint
from tests.engine.tiny_engine import (
    GATE_TIMEOUT_S,
    DirectPair,
    GatedRunner,
    Request,
    TinyModel,
    ToldDrafter,
    answers_alone,
    normal_engine,
    some_requests,
)

MAX_TURNS = 3000
REQUESTS = some_requests()
SHORT = (5, 6, 7)
THREE_CHUNKS = tuple(range(3, 23))


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


DRAFTS = st.sampled_from([None, 0, 2, 99])
"""None: no drafts. Else how many of the drafts of a step are right."""


def drafting(reference: Reference, num_right: int | None) -> dict[str, Any]:
    if num_right is None:
        return {}
    return {"num_draft_tokens": 3, "drafter": ToldDrafter(reference.answers, num_right)}


@given(histories(), NORMAL_POOLS, st.booleans(), st.booleans(), DRAFTS)
@settings(max_examples=40)
def test_a_normal_engine_answers_any_history_as_if_each_request_were_alone(
    reference: Reference,
    history: History,
    num_blocks: int,
    overlap: bool,
    stop_preempted: bool,
    num_right: int | None,
) -> None:
    normal = normal_engine(
        reference.model.runner(num_blocks),
        overlap=overlap,
        stop_preempted_request=stop_preempted,
        **drafting(reference, num_right),
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


@given(histories(), st.integers(15, 30), st.integers(18, 40), st.booleans(), DRAFTS)
@settings(max_examples=30)
def test_a_pair_answers_any_history_as_if_each_request_were_alone(
    reference: Reference,
    history: History,
    prompt_blocks: int,
    completion_blocks: int,
    overlap: bool,
    num_right: int | None,
) -> None:
    model = reference.model
    pair = DirectPair(
        model.runner(prompt_blocks),
        model.runner(completion_blocks),
        overlap=overlap,
        **drafting(reference, num_right),
    )
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


@contextmanager
def gated_engine(model: TinyModel, num_blocks: int = 32) -> Iterator[tuple[TestEngine, GatedRunner]]:
    """An overlapped NORMAL engine whose steps wait for the test's permission."""
    runner = model.gated_runner(num_blocks)
    normal = normal_engine(runner, overlap=True)
    try:
        yield normal, runner
    finally:
        runner.let_run(2)
        normal.engine.close()


def start_decoding(normal: TestEngine, runner: GatedRunner, request: Request) -> None:
    """Prefill a prompt of one chunk; its first token is out, nothing is in flight."""
    normal.engine.add(request.message())
    runner.let_run()
    normal.turn()
    normal.turn()
    assert len(normal.answers[request.request_id].token_ids) == 1


def test_results_come_one_step_late_and_the_engine_has_work_until_then(reference: Reference) -> None:
    with gated_engine(reference.model) as (normal, runner):
        start_decoding(normal, runner, Request("a", SHORT, greedy(3)))
        normal.turn()  # launches a decode step; it cannot have run
        assert runner.kinds == "P"
        assert normal.engine.has_work
        runner.let_run(2)
        normal.turn()  # launches the next one and takes the results of the first
        assert len(normal.answers["a"].token_ids) == 2
        assert normal.engine.has_work
        normal.turn()  # the results in flight end the sequence, so nothing is launched
        assert normal.has_ended("a")
        assert not normal.engine.has_work
        assert runner.kinds == "PDD"


def test_blocks_of_an_aborted_sequence_are_not_given_to_others_while_its_step_runs(
    reference: Reference,
) -> None:
    whole_pool = Request("b", THREE_CHUNKS, greedy(1))
    with gated_engine(reference.model, num_blocks=6) as (normal, runner):
        start_decoding(normal, runner, Request("a", SHORT, greedy(9)))
        normal.turn()
        normal.engine.abort("a")
        normal.engine.add(whole_pool.message())
        runner.let_run()
        normal.turn()
        assert normal.has_ended("a")
        assert normal.is_drained, "the other prompt is not admitted before the results are in"
        runner.let_run(3)
        while not normal.has_ended("b"):
            normal.turn()
        assert runner.kinds == "PDPPP"
        assert normal.answers["b"].token_ids == answers_alone(reference.model, [whole_pool])["b"]


def test_a_sequence_that_stops_keeps_its_blocks_while_the_step_behind_it_runs(reference: Reference) -> None:
    """That step was launched before anybody knew of the stop, and writes into the blocks."""
    _, second_token_id = answers_alone(reference.model, [Request("a", SHORT, greedy(2))])["a"]
    stopping = replace(greedy(9), stop_token_ids=(second_token_id,))
    with gated_engine(reference.model) as (normal, runner):
        start_decoding(normal, runner, Request("a", SHORT, stopping))
        normal.turn()
        runner.let_run()
        normal.turn()
        assert normal.has_ended("a")
        assert normal.engine.has_work
        assert not normal.is_drained
        runner.let_run()
        normal.turn()
        assert normal.is_drained
        assert not normal.engine.has_work


def test_clones_are_made_before_anyone_can_take_the_blocks_they_go_to(reference: Reference) -> None:
    with gated_engine(reference.model) as (normal, runner):
        start_decoding(normal, runner, Request("a", SHORT, greedy(9)))
        sequence = normal.scheduler.get("a")
        assert sequence is not None
        runner.let_run(2)
        normal.turn()
        normal.scheduler.fork(sequence, "b", now_s=0.0)
        normal.turn()
        assert runner.kinds == "PDD", "the step that clones has run"


def test_a_handover_is_offered_only_when_its_blocks_are_written(reference: Reference) -> None:
    runner = reference.model.gated_runner(16)
    pair = DirectPair(runner, reference.model.runner(16), overlap=True)
    pair.add(Request("a", SHORT, greedy(2)).message())
    pair.turn()
    assert pair.num_offers == 0
    runner.let_run()
    pair.prompt.turn()
    assert pair.num_offers == 1
    while not pair.is_drained:
        pair.turn()
    assert len(pair.answer("a").token_ids) == 2
    pair.close()


def test_chunks_of_a_prompt_follow_each_other_as_they_do_without_overlap(reference: Reference) -> None:
    """A decode step slipped in between would cost the prompt a whole attempt interval."""
    kinds = []
    for overlap in (False, True):
        runner = reference.model.gated_runner(64)
        runner.let_run(200)
        normal = normal_engine(runner, overlap=overlap)
        normal.engine.add(Request("a", SHORT, greedy(100)).message())
        while len(runner.kinds) < 2:
            normal.turn()
        normal.engine.add(Request("b", THREE_CHUNKS, greedy(2)).message())
        while not (normal.has_ended("a") and normal.has_ended("b")):
            normal.turn()
        kinds.append(runner.kinds)
        normal.engine.close()
    assert "DPPPD" in kinds[0]
    assert kinds[1] == kinds[0]


def test_an_exception_in_the_worker_surfaces_in_the_engine_thread(reference: Reference) -> None:
    with gated_engine(reference.model) as (normal, runner):
        start_decoding(normal, runner, Request("a", SHORT, greedy(9)))
        runner.error = ModelOutputError("damaged")
        runner.let_run(2)
        normal.turn()
        with pytest.raises(ModelOutputError, match="damaged"):
            normal.turn()


def test_closing_waits_for_the_step_that_runs_and_leaves_no_thread(reference: Reference) -> None:
    others = set(threading.enumerate())
    with gated_engine(reference.model) as (normal, runner):
        start_decoding(normal, runner, Request("a", SHORT, greedy(9)))
        normal.turn()
        assert runner.started.wait(GATE_TIMEOUT_S)
        closing = threading.Thread(target=normal.engine.close)
        closing.start()
        runner.let_run()
        closing.join(timeout=GATE_TIMEOUT_S)
        assert runner.kinds == "PD"
        started_here = set(threading.enumerate()) - others
        assert not any(thread.name.startswith("model") for thread in started_here)
