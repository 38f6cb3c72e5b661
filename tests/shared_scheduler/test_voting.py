from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_scheduler import GroupError, Scheduler, SchedulerConfig, ThreadGroup
from shared_scheduler.voting import GroupVote, SingleRank, StepClock
from tests.shared_scheduler.builders import config, sequence
from tests.shared_scheduler.histories import examples

Result = TypeVar("Result")


def on_all_ranks(
    size: int, work: Callable[[int, GroupVote], Result], timeout_s: float = 20.0
) -> list[Result]:
    """Run `work` on every rank of a thread group; the first error of any rank is raised."""
    group = ThreadGroup(size, timeout_s)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, index, group.rank(index)) for index in range(size)]
    return [future.result() for future in futures]


class ScriptedVote:
    """Answers with prepared results and remembers what was sent."""

    def __init__(self, *answers: int) -> None:
        self._answers = list(answers)
        self.sent: list[int] = []

    def allreduce_min(self, value: int) -> int:
        self.sent.append(value)
        return self._answers.pop(0)


def clock_at(decode_step: int, **changes: object) -> StepClock:
    intervals = {"prefill_attempt_interval": 70, "prefill_any_attempt_interval": 100}
    clock = StepClock(config(**(intervals | changes)))
    clock.decode_step = decode_step
    return clock


@pytest.mark.parametrize(
    ("decode_step", "all_point", "any_point"),
    [(0, True, False), (1, False, False), (70, True, False), (100, False, True), (700, True, True)],
)
def test_voting_points(decode_step: int, all_point: bool, any_point: bool) -> None:
    clock = clock_at(decode_step)
    assert (clock.is_all_point, clock.is_any_point) == (all_point, any_point)


def test_a_prompt_step_starts_the_count_again() -> None:
    clock = clock_at(5)
    clock.tick(prompt_run=False)
    assert clock.decode_step == 6
    clock.tick(prompt_run=True)
    assert clock.decode_step == 0


@pytest.mark.parametrize(("wants", "sent"), [(True, 1), (False, 0)])
def test_all_point_sends_one_for_want_and_needs_one(wants: bool, sent: int) -> None:
    for answer in (0, 1):
        vote = ScriptedVote(answer)
        assert clock_at(70).vote_prompt(vote, wants) is (answer == 1)
        assert vote.sent == [sent]


@pytest.mark.parametrize(("wants", "sent"), [(True, 0), (False, 1)])
def test_any_point_sends_zero_for_want_and_needs_zero(wants: bool, sent: int) -> None:
    for answer in (0, 1):
        vote = ScriptedVote(answer)
        assert clock_at(100).vote_prompt(vote, wants) is (answer == 0)
        assert vote.sent == [sent]


def test_any_wins_where_both_points_meet() -> None:
    vote = ScriptedVote(0)
    assert clock_at(700).vote_prompt(vote, wants=True)
    assert vote.sent == [0]


def test_second_vote_asks_whether_anybody_built_a_step() -> None:
    vote = ScriptedVote(0, 1)
    assert clock_at(0).vote_built(vote, built=False)
    assert not clock_at(0).vote_built(vote, built=False)
    assert vote.sent == [1, 1]


def test_a_group_of_one_decides_alone() -> None:
    assert SingleRank().allreduce_min(3) == 3


def test_all_ranks_get_the_smallest_value() -> None:
    def work(index: int, rank: GroupVote) -> list[int]:
        return [rank.allreduce_min((index * 7 + i) % 5) for i in range(50)]

    results = on_all_ranks(3, work)
    assert results[0] == results[1] == results[2]
    assert results[0] == [min((index * 7 + i) % 5 for index in range(3)) for i in range(50)]


@pytest.mark.parametrize("name", ["prefill_attempt_interval", "prefill_any_attempt_interval", "max_num_seqs"])
def test_ranks_with_different_options_do_not_start(name: str) -> None:
    def work(index: int, rank: GroupVote) -> str:
        with pytest.raises(GroupError) as caught:
            Scheduler(config(**{name: 20 + index}), group=rank)
        return str(caught.value)

    messages = on_all_ranks(2, work)
    assert messages[0] == messages[1]
    assert f"differ in {name}: 20 and 21" in messages[0]


def test_options_that_are_no_numbers_are_compared_too() -> None:
    def work(index: int, rank: GroupVote) -> str:
        with pytest.raises(GroupError) as caught:
            Scheduler(config(eos_token_ids=(index,)), group=rank)
        return str(caught.value)

    assert "differ in eos_token_ids: (1,) here" in on_all_ranks(2, work)[1]


def test_pools_may_differ_between_ranks() -> None:
    on_all_ranks(2, lambda index, rank: Scheduler(config(num_blocks=9 + index), group=rank).usage)


def test_a_rank_that_is_gone_ends_the_group() -> None:
    group = ThreadGroup(2, timeout_s=20.0)
    group.leave()
    with pytest.raises(GroupError, match="does not answer"):
        Scheduler(config(), group=group.rank(0))


def test_a_rank_that_does_not_answer_in_time_ends_the_group() -> None:
    with pytest.raises(GroupError, match="does not answer"):
        ThreadGroup(2, timeout_s=0.01).rank(0).allreduce_min(1)


def test_a_rank_without_prompts_runs_an_empty_prompt_step_with_the_others() -> None:
    """Step 0 is an ALL point: nobody prefills while one rank has nothing. Step 3 is an ANY point."""

    def work(index: int, rank: GroupVote) -> list[tuple[bool, int]]:
        scheduler = Scheduler(config(prefill_attempt_interval=2, prefill_any_attempt_interval=3), group=rank)
        if index == 0:
            scheduler.add_sequence(sequence("a", 3, max_tokens=1), 0.0)
        return [run_one(scheduler) for _ in range(5)]

    busy, idle = on_all_ranks(2, work)
    assert [kind for kind, _ in busy] == [kind for kind, _ in idle] == [False, False, False, True, False]
    assert [count for _, count in busy] == [0, 0, 0, 1, 0]
    assert [count for _, count in idle] == [0, 0, 0, 0, 0]


def run_one(scheduler: Scheduler) -> tuple[bool, int]:
    """A step's kind and number of sequences; everybody samples the same id."""
    outputs = scheduler.schedule()
    scheduler.check_invariants()
    scheduler.process_outputs(outputs, np.full(len(outputs.sequences), 7), now_s=0.0)
    return outputs.prompt_run, len(outputs.sequences)


Arrivals = dict[int, list[tuple[int, int]]]
arrivals = st.dictionaries(
    st.integers(0, 30), st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6)), max_size=3), max_size=8
)


def run_rank(scheduler: Scheduler, arrivals: Arrivals, num_steps: int) -> list[bool]:
    kinds = []
    for number in range(num_steps):
        for i, (length, max_tokens) in enumerate(arrivals.get(number, [])):
            scheduler.add_sequence(sequence(f"{number}-{i}", length, max_tokens), 0.0)
        kinds.append(run_one(scheduler)[0])
    assert not scheduler.num_waiting, "a rank's prompts were starved"
    assert scheduler.num_free_blocks == scheduler.num_usable_blocks
    return kinds


@examples(25)
@given(
    st.lists(arrivals, min_size=2, max_size=3),
    st.integers(1, 5),
    st.integers(1, 7),
    st.booleans(),
    st.lists(st.integers(7, 30), min_size=3, max_size=3),
)
def test_ranks_never_differ_in_step_kind(
    patterns: list[Arrivals], all_interval: int, any_interval: int, chunked: bool, pools: list[int]
) -> None:
    def rank_config(index: int) -> SchedulerConfig:
        return config(
            num_blocks=pools[index],
            prefill_attempt_interval=all_interval,
            prefill_any_attempt_interval=any_interval,
            chunked_prefill=chunked,
            max_num_batched_tokens=8 if chunked else 32,
            stop_preempted_request=True,
        )

    def work(index: int, rank: GroupVote) -> list[bool]:
        return run_rank(Scheduler(rank_config(index), group=rank), patterns[index], num_steps=400)

    kinds = on_all_ranks(len(patterns), work)
    assert all(kind == kinds[0] for kind in kinds)
