from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.role_policies import (
    POLICIES,
    Ask,
    Candidate,
    RolePolicy,
    least_tokens,
    power_of_two,
    prefix,
    round_robin,
    session,
)
from tests.proxy.test_pairing import engine


def candidates(*loads: int, cached: tuple[int, ...] = ()) -> list[Candidate]:
    hits = (*cached, *(0,) * (len(loads) - len(cached)))
    return [
        Candidate(engine("prompt", str(number)), load, hit)
        for number, (load, hit) in enumerate(zip(loads, hits, strict=True))
    ]


def place(policy: RolePolicy, among: list[Candidate], ask: Ask) -> int:
    return among.index(policy(among, ask))


def test_round_robin_takes_turns_whatever_the_load() -> None:
    assert [place(round_robin, candidates(9, 0, 5), Ask(turn=turn)) for turn in range(6)] == [0, 1, 2] * 2


def test_the_least_busy_is_taken_and_equals_take_turns() -> None:
    assert place(least_tokens, candidates(9, 1, 5), Ask(turn=7)) == 1
    assert {place(least_tokens, candidates(1, 9, 1), Ask(turn=turn)) for turn in range(3)} == {0, 2}


def test_two_are_drawn_and_the_less_busy_of_them_is_taken() -> None:
    among = candidates(5, 9, 1)
    assert place(power_of_two, among, Ask(draws=(0.0, 0.0))) == 0
    assert place(power_of_two, among, Ask(draws=(0.4, 0.9))) == 2
    assert place(power_of_two, candidates(3), Ask(draws=(0.9, 0.9))) == 0


@pytest.mark.parametrize(
    ("loads", "cached", "expected"),
    [((0, 0), (0, 64), 1), ((0, 63), (0, 64), 1), ((0, 65), (0, 64), 0), ((10, 10), (32, 64), 1)],
)
def test_cached_tokens_count_against_the_queue(
    loads: tuple[int, ...], cached: tuple[int, ...], expected: int
) -> None:
    assert place(prefix, candidates(*loads, cached=cached), Ask(num_prompt_tokens=100)) == expected


def test_a_session_stays_and_moves_only_when_its_engine_goes() -> None:
    among = candidates(0, 0, 0, 0)
    names = [f"s{number}" for number in range(200)]
    chosen = {name: session(among, Ask(session=name)) for name in names}
    assert min(Counter(candidate.engine.url for candidate in chosen.values()).values()) > 25
    fewer = among[:3]
    for name in names:
        again = session(fewer, Ask(session=name))
        assert again == chosen[name] or chosen[name] is among[3]


def test_without_a_session_the_least_busy_is_taken() -> None:
    assert place(session, candidates(9, 1), Ask()) == 1


@given(
    name=st.sampled_from(sorted(POLICIES)),
    loads=st.lists(st.integers(0, 1000), min_size=1, max_size=6),
    turn=st.integers(0, 1000),
    draws=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
)
def test_every_policy_takes_one_of_the_candidates_and_the_same_one_again(
    name: str, loads: list[int], turn: int, draws: tuple[float, float]
) -> None:
    among, ask = candidates(*loads), Ask(turn=turn, draws=draws, session=str(turn))
    policy = POLICIES[name]  # type: ignore[index]
    assert policy(among, ask) is policy(among, ask)
    assert policy(among, ask) in among
