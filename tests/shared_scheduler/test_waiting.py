"""Who is prefilled first, by policy; who is never passed over for long; who waits for a prefix of others.

`checked_queue` compares every head with a full sort, here and in all random lives.
"""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_scheduler import ConfigError, EngineType, Scheduler, Sequence, WaitingPolicy
from tests.shared_scheduler.builders import config, names, run_ids, sequence
from tests.shared_scheduler.checked_queue import check_heads
from tests.shared_scheduler.histories import busy_history, configs, examples, run_life
from wire.sampling import SamplingParams

POLICIES = [policy for policy in WaitingPolicy if policy is not WaitingPolicy.FCFS]


def prompt_engine(policy: WaitingPolicy, **changes: Any) -> Scheduler:
    """Takes one prompt in a step; blocks of 4 tokens, ample pool."""
    limits: dict[str, Any] = {
        "engine_type": EngineType.PROMPT,
        "num_blocks": 1000,
        "max_num_seqs": 1,
        "prefix_cache": True,
        "waiting_policy": policy,
    }
    scheduler = Scheduler(config(**(limits | changes)))
    check_heads(scheduler)
    return scheduler


def request(request_id: str, tokens: Iterable[int], max_tokens: int = 2, **changes: Any) -> Sequence:
    return Sequence(request_id, tuple(tokens), SamplingParams(max_tokens=max_tokens), block_size=4, **changes)


def prefill(scheduler: Scheduler) -> list[str]:
    """Names of one step; everything that is done is let go of."""
    outputs, results = run_ids(scheduler)
    for s in results.prompts_done:
        scheduler.release_handover(s)
    return names(outputs.sequences)


def order_of(scheduler: Scheduler) -> list[str]:
    order: list[str] = []
    while scheduler.num_waiting:
        order += prefill(scheduler)
    return order


def distinct(number: int) -> range:
    """A prompt of 8 tokens that shares nothing with others."""
    return range(100 * number, 100 * number + 8)


def add_all(scheduler: Scheduler, *requests: Sequence) -> None:
    for each in requests:
        scheduler.add_sequence(each, 0.0)


def test_lpm_takes_the_longest_cached_prefix_and_equals_as_they_came() -> None:
    scheduler = prompt_engine(WaitingPolicy.LPM)
    add_all(scheduler, request("known", range(8)))
    prefill(scheduler)
    add_all(
        scheduler,
        request("none", distinct(1)),
        request("one", (0, 1, 2, 3, 50, 51, 52, 53)),
        request("none too", distinct(2)),
        request("two", (*range(8), 60)),
    )
    assert order_of(scheduler) == ["two", "one", "none", "none too"]


def test_lpm_learns_of_blocks_that_come_and_go() -> None:
    """4 blocks: what p takes evicts what b would have found, and is what c finds."""
    scheduler = prompt_engine(WaitingPolicy.LPM, num_blocks=5)
    add_all(scheduler, request("x", range(8)))
    prefill(scheduler)
    add_all(scheduler, request("p", range(100, 116), priority=1), request("a", (*range(8), 9)))
    assert prefill(scheduler) == ["a"]
    assert prefill(scheduler) == ["p"]
    add_all(scheduler, request("b", (*range(8), 9)), request("c", (*range(100, 108), 9)))
    assert prefill(scheduler) == ["c"]
    assert prefill(scheduler) == ["b"]


def test_largest_max_tokens_first() -> None:
    scheduler = prompt_engine(WaitingPolicy.LOF)
    limits = {"a": 5, "b": 9, "c": 5, "d": 7}
    add_all(scheduler, *(request(name, distinct(i), limit) for i, (name, limit) in enumerate(limits.items())))
    assert order_of(scheduler) == ["b", "d", "a", "c"]


def test_highest_priority_first() -> None:
    scheduler = prompt_engine(WaitingPolicy.PRIORITY)
    priorities = {"a": 0, "b": 3, "c": -1, "d": 3}
    add_all(
        scheduler,
        *(request(name, distinct(i), priority=at) for i, (name, at) in enumerate(priorities.items())),
    )
    assert order_of(scheduler) == ["b", "d", "a", "c"]


def test_the_routing_key_of_which_most_are_served_goes_first() -> None:
    scheduler = prompt_engine(WaitingPolicy.ROUTING_KEY)
    keys = {"a": "x", "b": "", "c": "y", "d": "x", "e": "y", "f": "x", "g": ""}
    add_all(scheduler, *(request(n, distinct(i), routing_key=key) for i, (n, key) in enumerate(keys.items())))
    order: list[str] = []
    held: list[Sequence] = []
    while scheduler.num_waiting:
        outputs, results = run_ids(scheduler)
        order += names(outputs.sequences)
        held += results.prompts_done
        if order[-1] == "f":
            for s in held[:3]:
                scheduler.release_handover(s)  # nobody is served any more: as they came
    assert order == ["a", "d", "f", "b", "c", "e", "g"]


def test_dfs_weight_goes_down_the_branch_that_most_wait_for() -> None:
    scheduler = prompt_engine(WaitingPolicy.DFS_WEIGHT, sharing_tokens=1000)
    light, heavy = tuple(range(8)), tuple(range(20, 28))
    add_all(scheduler, request("l", light), request("h", heavy))
    assert order_of(scheduler) == ["l", "h"]
    add_all(
        scheduler,
        request("l1", (*light, 1)),
        request("other", distinct(7)),
        request("h1", (*heavy[:4], *distinct(8)[:4])),
        request("h2", (*heavy, 2)),
        request("h3", (*heavy, 3)),
    )
    assert order_of(scheduler) == ["h2", "h3", "h1", "l1", "other"]


def test_the_same_seed_draws_the_same_lots() -> None:
    def order(seed: int) -> list[str]:
        scheduler = prompt_engine(WaitingPolicy.RANDOM, waiting_seed=seed)
        add_all(scheduler, *(request(str(i), distinct(i)) for i in range(8)))
        return order_of(scheduler)

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(order(1)) == [str(i) for i in range(8)]


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_is_passed_over_in_more_steps_than_the_limit(policy: WaitingPolicy) -> None:
    """A stream of requests that are better by every measure, two in each step; one is taken."""
    scheduler = prompt_engine(policy, waiting_age_limit=5, waiting_seed=3)
    add_all(scheduler, request("seen", range(8), routing_key="k"))
    run_ids(scheduler)  # and stays, so that its routing key counts
    add_all(scheduler, request("old", distinct(5), 1), request("old 2", distinct(6), 1))
    order: list[str] = []
    for step in range(8):
        for number in range(2):
            better = (*range(8), 1000 + step * 10 + number)
            changes = {"max_tokens": 99, "priority": 9, "routing_key": "k"}
            add_all(scheduler, request(f"{step}.{number}", better, **changes))
        order += prefill(scheduler)
    assert order.index("old") <= 5
    assert order.index("old 2") <= 6


@pytest.mark.parametrize("policy", POLICIES)
def test_of_requests_that_share_an_uncached_prefix_one_goes_first(policy: WaitingPolicy) -> None:
    """The step has room for all three; b waits for a's blocks and then computes one token."""
    scheduler = prompt_engine(policy, max_num_batched_tokens=64, max_num_seqs=3, sharing_tokens=8)
    shared = tuple(range(16))
    add_all(
        scheduler,
        request("a", (*shared, 90), priority=1),
        request("b", (*shared, 91), priority=1),
        request("c", distinct(4)),
    )
    outputs, _ = run_ids(scheduler)
    first = set(names(outputs.sequences))
    assert first in ({"a", "c"}, {"b", "c"})
    outputs, _ = run_ids(scheduler)
    assert set(names(outputs.sequences)) == {"a", "b"} - first
    assert outputs.seqlens_q.tolist() == [1]
    assert outputs.num_cached_tokens == 16


def test_followers_wait_for_every_chunk_of_what_they_share() -> None:
    scheduler = prompt_engine(
        WaitingPolicy.LPM, sharing_tokens=8, max_model_len=64, max_num_batched_tokens=8, max_num_seqs=2
    )
    shared = tuple(range(32))
    add_all(scheduler, request("a", (*shared, 90)), request("b", (*shared, 91)))
    assert [prefill(scheduler) for _ in range(5)] == [["a"]] * 4 + [["a", "b"]]


def test_followers_go_on_when_their_leader_is_aborted() -> None:
    scheduler = prompt_engine(
        WaitingPolicy.LPM, sharing_tokens=8, max_model_len=64, max_num_batched_tokens=8, max_num_seqs=2
    )
    shared = tuple(range(32))
    add_all(scheduler, request("a", (*shared, 90)), request("b", (*shared, 91)))
    assert prefill(scheduler) == ["a"]
    scheduler.abort("a")
    assert prefill(scheduler) == ["b"]


def test_different_salts_share_nothing_and_wait_for_nobody() -> None:
    scheduler = prompt_engine(WaitingPolicy.LPM, sharing_tokens=8, max_num_batched_tokens=64, max_num_seqs=2)
    shared = tuple(range(16))
    add_all(scheduler, request("a", shared, cache_salt="1"), request("b", shared, cache_salt="2"))
    assert prefill(scheduler) == ["a", "b"]


def test_a_blocked_head_blocks_whoever_is_behind_it_in_the_policys_order() -> None:
    scheduler = prompt_engine(WaitingPolicy.PRIORITY)
    add_all(
        scheduler,
        request("a", distinct(1)),
        request("image", distinct(2), priority=1, schedulable=False),
        request("b", distinct(3), priority=2),
    )
    assert prefill(scheduler) == ["b"]
    assert prefill(scheduler) == []
    scheduler.set_schedulable("image")
    assert order_of(scheduler) == ["image", "a"]


def test_half_computed_prompts_preempted_ones_and_forks_go_before_any_newcomer() -> None:
    scheduler = prompt_engine(
        WaitingPolicy.PRIORITY, max_model_len=64, max_num_batched_tokens=8, max_num_seqs=2
    )
    add_all(scheduler, request("long", range(20)))
    assert prefill(scheduler) == ["long"]
    add_all(scheduler, request("urgent", distinct(3), priority=9))
    assert prefill(scheduler) == ["long"]
    parent = scheduler.get("long")
    assert parent is not None
    scheduler.fork(parent, "fork", now_s=0.0)
    assert prefill(scheduler) == ["fork", "long"]
    assert prefill(scheduler) == ["urgent"]


@pytest.mark.parametrize("policy", POLICIES)
@examples(12)
@given(data=st.data(), seed=st.integers(0, 2**32), overlapped=st.booleans())
def test_random_lives_keep_order_and_invariants(policy, data, seed, overlapped) -> None:
    kind = data.draw(st.sampled_from([EngineType.NORMAL, EngineType.PROMPT]))
    run_life(
        data.draw(configs(kind, prefix_cache=True, waiting_policy=policy)), busy_history(seed), overlapped
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"waiting_policy": WaitingPolicy.LPM}, "waiting_policy=lpm with prefix_cache=False"),
        ({"waiting_policy": WaitingPolicy.DFS_WEIGHT}, "waiting_policy=dfs-weight with prefix_cache=False"),
        (
            {"waiting_policy": WaitingPolicy.LOF, "engine_type": EngineType.COMPLETION},
            "nothing waits for prefill",
        ),
        ({"waiting_age_limit": 0}, "waiting_age_limit must be at least 1"),
        ({"sharing_tokens": 0}, "sharing_tokens must be at least 1"),
    ],
)
def test_impossible_policies_are_refused_by_name(changes, words) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**changes)


def test_first_come_first_served_reads_no_priority() -> None:
    scheduler = prompt_engine(WaitingPolicy.FCFS)
    add_all(scheduler, sequence("a", 8), sequence("b", 8, priority=9))
    assert prefill(scheduler) == ["a"]
