"""Engines that step alike: votes, idle ranks, placeholders, and what ends a group."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.group import EngineGroup
from engine.rendezvous import Member, exchange_members, find_store
from shared_scheduler import EngineType, GroupError, SchedulerConfig
from tests.engine.group_members import OPTIONS, Rank, join, place
from tests.engine.pair import BLOCK_SIZE, CHUNK, EOS, greedy, tiny_checkpoint
from tests.engine.ranks import Arrival, Finish, RankEngine, connected_ranks, errors_of, in_parallel
from tests.engine.tiny_engine import Request, TinyModel, answers_alone
from tests.ports import free_port

DETECTION_S = 10.0


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    with connected_ranks(2) as ranks:
        yield ranks


def begin(group: EngineGroup, step_id: int, prompt_run: bool = False, *, has_work: bool = True) -> bool:
    return group.begin_step(step_id, prompt_run, is_empty=not has_work, has_work=has_work)


# ----- votes and steps


def test_a_vote_gives_every_rank_the_smallest_value() -> None:
    with connected_ranks(3) as ranks:
        votes = in_parallel(3, lambda r: [ranks[r].group.allreduce_min(v) for v in (r, 7 - r, -r)])
    assert votes == [[0, 5, -2]] * 3


def test_a_step_goes_on_while_any_rank_has_work(ranks: list[Rank]) -> None:
    groups = [rank.group for rank in ranks]
    empty = in_parallel(2, lambda r: begin(groups[r], 1, has_work=r == 0))
    assert empty == [False, False]
    assert [group.is_busy for group in groups] == [True, True]
    empty = in_parallel(2, lambda r: begin(groups[r], 2, has_work=False))
    assert empty == [True, True]
    assert [group.is_busy for group in groups] == [False, False]


@pytest.mark.parametrize(
    ("kinds", "steps", "message"),
    [
        (
            (True, False),
            (5, 5),
            "rank 0 is at a prompt step (step 5), collective 0, rank 1 is at a decode step",
        ),
        (
            (False, False),
            (5, 6),
            "rank 0 is at a decode step (step 5), collective 0, rank 1 is at a decode step (step 6)",
        ),
    ],
)
def test_ranks_out_of_step_are_told_what_each_was_doing(
    ranks: list[Rank], kinds: tuple[bool, bool], steps: tuple[int, int], message: str
) -> None:
    errors = errors_of(2, lambda r: begin(ranks[r].group, steps[r], kinds[r]))
    assert all(message in error for error in errors), errors
    with pytest.raises(GroupError, match="do not step alike"):
        ranks[0].group.allreduce_min(1)


def test_a_rank_that_votes_while_another_steps_is_told(ranks: list[Rank]) -> None:
    errors = errors_of(2, lambda r: begin(ranks[0].group, 1) if r == 0 else ranks[1].group.allreduce_min(1))
    assert all("rank 1 is at a vote" in error for error in errors), errors


# ----- sleep


def sleep_until_called(ranks: list[Rank]) -> None:
    """No vote is due by time: one that a rank holds alone ends only when its step times out."""
    for rank in ranks:
        rank.group._idle_vote_s = math.inf


def test_sleeping_ranks_are_woken_by_the_one_that_has_work(ranks: list[Rank]) -> None:
    def wake_up(r: int) -> bool:
        if r == 1:
            assert ranks[1].woken.wait(10)
        return ranks[r].group.takes_step(r == 0)

    sleep_until_called(ranks)
    assert not ranks[1].group.takes_step(False)
    assert in_parallel(2, wake_up) == [True, True]


def test_a_call_to_a_past_vote_wakes_nobody_twice(ranks: list[Rank]) -> None:
    def vote_once(r: int) -> bool:
        if r == 1:
            assert ranks[1].woken.wait(10)
        assert ranks[r].group.takes_step(r == 0)
        begin(ranks[r].group, 1, has_work=False)
        return ranks[r].group.takes_step(False)

    sleep_until_called(ranks)
    assert in_parallel(2, vote_once) == [False, False]


def test_a_rank_that_leaves_while_all_sleep_is_noticed_at_once(ranks: list[Rank]) -> None:
    ranks[1].group.close()
    assert ranks[0].woken.wait(10)
    with pytest.raises(GroupError, match="rank 1 has left"):
        ranks[0].group.takes_step(False)


# ----- forming


def test_a_difference_ends_every_rank_naming_the_option_and_the_values() -> None:
    port = free_port()
    options = ({**OPTIONS, "--max-num-seqs": "8"}, {**OPTIONS, "--max-num-seqs": "4"})
    errors = errors_of(2, lambda r: join(place(r, 2, port), options[r]))
    expected = (
        "ranks of one group differ in --max-num-seqs: 8 on rank 0, 4 on rank 1; give all ranks the same"
    )
    assert errors == [expected, expected]


def test_a_rank_waits_until_the_others_are_there() -> None:
    port = free_port()
    stages: list[str] = []
    is_waiting = threading.Event()

    def report(stage: str, fraction: float) -> None:
        stages.append(stage)
        if stage.startswith("waiting for rank 1"):
            is_waiting.set()

    def arrive(r: int) -> Rank:
        if r == 1:
            assert is_waiting.wait(30)
        return join(place(r, 2, port), report=report if r == 0 else lambda *_: None)

    for rank in in_parallel(2, arrive):
        rank.group.close()
    assert stages == [f"waiting for rank 1 of 2 at 127.0.0.1:{port}"]


class Enough(Exception):
    """Ends a wait that would go on."""


def test_nobody_slips_into_a_group_that_has_formed() -> None:
    def report(stage: str, fraction: float) -> None:
        if "is taken" in stage:
            raise Enough(stage)

    port = free_port()
    ranks = in_parallel(2, lambda r: join(place(r, 2, port)))
    with pytest.raises(Enough, match=r"rank 1 of the group at .* is taken"):
        join(place(1, 2, port), report=report)
    for rank in ranks:
        rank.group.close()


def test_a_second_rank_0_is_refused_naming_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.rendezvous.BIND_RETRY_S", 0.0)
    port = free_port()
    ranks = in_parallel(2, lambda r: join(place(r, 2, port)))
    (error,) = errors_of(1, lambda r: join(place(0, 2, port)))
    assert f"--dp-address 127.0.0.1:{port}" in error
    for rank in ranks:
        rank.group.close()


def test_a_rank_that_vanishes_while_the_group_forms_ends_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.group_bell.LISTENERS_WAIT_S", 0.2)
    port = free_port()

    def attempt(r: int) -> object:
        if r == 0:
            return join(place(0, 2, port))
        store, _ = find_store(place(1, 2, port), lambda *_: None)
        return exchange_members(
            store, place(1, 2, port), Member(OPTIONS, "tcp://127.0.0.1:1"), lambda *_: None
        )

    error, _ = errors_of(2, attempt)
    assert "only 0 of 1 other ranks listen" in error


# ----- a rank that is lost


class RankProcess:
    """A rank in a process of its own; `tests/engine/rank_process.py` prints one JSON line per event."""

    def __init__(self, rank: int, port: int, mode: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.rank_process", str(rank), str(port), mode],
            stdout=subprocess.PIPE,
            text=True,
        )

    def event(self) -> dict[str, object]:
        assert self._process.stdout is not None
        event: dict[str, object] = json.loads(self._process.stdout.readline())
        return event

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.mark.parametrize(
    ("number", "lost", "mode"),
    [
        (signal.SIGKILL, 0, "busy"),
        (signal.SIGKILL, 1, "idle"),
        (signal.SIGSTOP, 0, "idle"),
        (signal.SIGSTOP, 1, "busy"),
    ],
)
def test_a_lost_rank_ends_the_group_within_ten_seconds(number: signal.Signals, lost: int, mode: str) -> None:
    port = free_port()
    processes = [RankProcess(rank, port, mode) for rank in range(2)]
    try:
        assert [process.event() for process in processes] == [{"event": "formed"}] * 2
        processes[lost].signal(number)
        lost_s = time.monotonic()
        error = str(processes[1 - lost].event()["error"])
        assert time.monotonic() - lost_s < DETECTION_S
    finally:
        for process in processes:
            process.end()
    assert error.startswith(f"the group of rank {1 - lost} has ended: ")
    if number is signal.SIGSTOP:
        assert f"rank {lost} does not answer" in error


def test_a_slow_rank_is_waited_for_as_long_as_it_lives() -> None:
    with connected_ranks(2, step_timeout_s=1.0) as ranks:
        release = threading.Event()

        def step(r: int) -> str:
            if r == 1:
                assert release.wait(30)
                return ""
            with pytest.raises(GroupError) as error:
                begin(ranks[0].group, 1)
            release.set()
            return str(error.value)

        message, _ = in_parallel(2, step)
    assert "has not begun its step for 1 s" in message


# ----- whole engines


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel.load(tiny_checkpoint(Path(tmp_path_factory.mktemp("tiny"))))


def config(num_blocks: int, all_interval: int, any_interval: int) -> SchedulerConfig:
    return SchedulerConfig(
        engine_type=EngineType.NORMAL,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=CHUNK,
        max_model_len=(num_blocks - 1) * BLOCK_SIZE,
        eos_token_ids=(EOS,),
        prefill_attempt_interval=all_interval,
        prefill_any_attempt_interval=any_interval,
        stop_preempted_request=False,
    )


def run_ranks(
    ranks: list[Rank],
    model: TinyModel,
    settings_of: SchedulerConfig,
    arrivals: list[list[Arrival]],
    *,
    overlap: bool = False,
) -> list[RankEngine]:
    engines = in_parallel(
        len(ranks),
        lambda r: RankEngine(ranks[r], settings_of, model.runner(settings_of.num_blocks), overlap=overlap),
    )
    finish = Finish(ranks)
    in_parallel(len(ranks), lambda r: engines[r].serve(r, arrivals[r], finish))
    return engines


def requests_of(prompts: dict[str, tuple[int, int]]) -> dict[str, Request]:
    """id → (prompt tokens, output tokens)."""
    return {
        request_id: Request(
            request_id, tuple(3 + (7 * i + len(request_id)) % 120 for i in range(n)), greedy(m)
        )
        for request_id, (n, m) in prompts.items()
    }


@pytest.mark.parametrize("overlap", [False, True])
def test_a_rank_without_work_runs_placeholders_and_answers_do_not_change(
    ranks: list[Rank], model: TinyModel, overlap: bool
) -> None:
    requests = requests_of({"a": (20, 12), "bb": (5, 9)})
    arrivals = [[Arrival(0, request.message()) for request in requests.values()], []]
    busy, idle = run_ranks(ranks, model, config(64, 2, 3), arrivals, overlap=overlap)
    assert {name: answer.token_ids for name, answer in busy.answers.items()} == answers_alone(
        model, list(requests.values())
    )
    assert busy.recorder.kinds == idle.recorder.kinds
    assert "P" in idle.recorder.kinds
    assert idle.engine.stats().num_steps == 0
    assert idle.engine.stats().num_placeholder_steps >= 12


def test_nobody_steps_through_an_interval_that_is_empty_everywhere(
    ranks: list[Rank], model: TinyModel
) -> None:
    """A lone request waits for the ANY point at decode step 1000, but not in 1000 collectives."""
    requests = requests_of({"a": (4, 1)})
    arrivals = [[Arrival(0, requests["a"].message())], []]
    busy, _ = run_ranks(ranks, model, config(64, 400, 1000), arrivals)
    assert busy.answers["a"].end is not None
    assert len(busy.recorder.kinds) < 20
    assert busy.recorder.kinds.count("P") == 1


@st.composite
def histories(draw: st.DrawFn) -> list[list[Arrival]]:
    """Requests for two ranks, at any turn, of any length; some clients leave."""
    arrivals: list[list[Arrival]] = [[], []]
    for number in range(draw(st.integers(1, 8))):
        turn = draw(st.integers(0, 40))
        request = Request(
            f"r{number}",
            tuple(draw(st.lists(st.integers(3, 127), min_size=1, max_size=30))),
            greedy(draw(st.integers(1, 20))),
        )
        leaves = draw(st.none() | st.integers(turn, turn + 30))
        arrivals[draw(st.integers(0, 1))].append(Arrival(turn, request.message(), leaves))
    return arrivals


@settings(max_examples=20)
@given(
    arrivals=histories(),
    num_blocks=st.sampled_from([15, 24, 64]),
    intervals=st.tuples(st.integers(1, 6), st.integers(1, 9)),
    overlap=st.booleans(),
)
def test_ranks_never_differ_in_the_kind_of_step(
    model: TinyModel,
    arrivals: list[list[Arrival]],
    num_blocks: int,
    intervals: tuple[int, int],
    overlap: bool,
) -> None:
    """A difference would end the group; whoever stays gets the whole answer."""
    with connected_ranks(2) as ranks:
        engines = run_ranks(ranks, model, config(num_blocks, *intervals), arrivals, overlap=overlap)
    assert engines[0].recorder.kinds == engines[1].recorder.kinds
    for engine, own in zip(engines, arrivals, strict=True):
        assert engine.scheduler.num_free_blocks == engine.scheduler.num_usable_blocks
        for arrival in own:
            answer = engine.answers[arrival.request.request_id]
            assert answer.end is not None
            if arrival.abort_turn is None:
                assert len(answer.token_ids) == arrival.request.sampling.max_tokens
