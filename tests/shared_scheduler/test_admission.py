"""The estimate keeps a request waiting that, admitted, would cost somebody's answer."""

import numpy as np
import pytest

from benchmarks import admission as benchmark
from shared_scheduler import AdmissionResult, AllocStatus, ConfigError, EngineType, Scheduler, SequenceStatus
from tests.shared_scheduler.builders import config, names, run_ids, sequence


def completion(*, estimate: bool, **changes) -> Scheduler:
    """8 blocks of 4 tokens."""
    return Scheduler(
        config(
            engine_type=EngineType.COMPLETION,
            remote_growth_tokens=0,
            admission_estimate=estimate,
            **changes,
        )
    )


def arrive(scheduler: Scheduler, request_id: str, num_prompt_tokens: int, max_tokens: int) -> AllocStatus:
    s = sequence(request_id, num_prompt_tokens, max_tokens)
    status = scheduler.reserve_remote(s, 0.0)
    if status is AllocStatus.OK:
        scheduler.admit_arrived(s, 7)
    return status


def run_to_end(scheduler: Scheduler) -> dict[str, SequenceStatus]:
    ends = {}
    for _ in range(100):
        if not scheduler.has_work():
            return ends
        outputs, results = run_ids(scheduler)
        for s in (*outputs.finished, *outputs.ignored, *results.finished):
            ends[s.request_id] = s.status
    raise AssertionError("not drained")


def test_without_the_estimate_two_that_cannot_both_end_are_both_admitted_and_one_is_killed() -> None:
    """Each of them stores 4 + 13 tokens in 5 blocks; the pool has 8."""
    scheduler = completion(estimate=False)
    assert arrive(scheduler, "a", 4, 14) is AllocStatus.OK
    assert arrive(scheduler, "b", 4, 14) is AllocStatus.OK
    ends = run_to_end(scheduler)
    assert sorted(status.name for status in ends.values()) == [
        "FINISHED_LENGTH_CAPPED",
        "FINISHED_PREEMPTED",
    ]


def test_with_the_estimate_the_second_waits_until_both_fit() -> None:
    scheduler = completion(estimate=True)
    assert arrive(scheduler, "a", 4, 14) is AllocStatus.OK
    num_refused = 0
    while arrive(scheduler, "b", 4, 14) is AllocStatus.LATER:
        num_refused += 1
        run_ids(scheduler)
    # After k steps a has 12 - k to go. At its end it holds 17 tokens, b by then 4 and 12 - k more: at most
    # (17 + 3) / 4 + (4 + 12 - k + 3) / 4, which is 8 with k = 7.
    assert num_refused == 7
    assert run_to_end(scheduler) == dict.fromkeys("ab", SequenceStatus.FINISHED_LENGTH_CAPPED)


def test_a_request_alone_is_never_kept_waiting() -> None:
    scheduler = completion(estimate=True)
    assert arrive(scheduler, "a", 24, 100) is AllocStatus.OK


def test_what_ended_sequences_left_unused_lets_more_in() -> None:
    """After requests that used 2 of the 100 tokens they were allowed, two long limits are no hindrance."""
    scheduler = completion(estimate=True, new_token_ratio_floor=0.01, new_token_ratio_decay_steps=1)
    for number in range(3):
        arrive(scheduler, str(number), 4, 100)
        run_ids(scheduler)  # decays to the floor
        outputs = scheduler.schedule()
        scheduler.process_outputs(outputs, np.array([1], np.int64), now_s=0.0)  # EOS
    assert arrive(scheduler, "a", 4, 100) is AllocStatus.OK
    assert arrive(scheduler, "b", 4, 100) is AllocStatus.OK


def test_forks_wait_in_prompted_until_they_fit() -> None:
    """The request's other choices share its blocks, so only here can their output be reckoned with."""
    scheduler = completion(estimate=True)
    a = sequence("a", 4, 20)
    scheduler.reserve_remote(a, 0.0)
    scheduler.admit_arrived(a, 7)
    run_ids(scheduler)
    scheduler.fork(a, "b", now_s=0.0)
    outputs, _ = run_ids(scheduler)
    assert names(outputs.sequences) == ["a"]
    assert run_to_end(scheduler) == dict.fromkeys("ab", SequenceStatus.FINISHED_LENGTH_CAPPED)


def test_a_normal_engine_says_why_the_next_prompt_is_not_taken() -> None:
    scheduler = Scheduler(config(admission_estimate=True, max_num_batched_tokens=32))
    for name in "ab":
        scheduler.add_sequence(sequence(name, 8, 20), 0.0)
    outputs, _ = run_ids(scheduler)
    assert (names(outputs.sequences), outputs.admission) == (["a"], AdmissionResult.NO_TOKEN)
    scheduler = Scheduler(config(max_num_seqs=1))
    for name in "ab":
        scheduler.add_sequence(sequence(name, 8, 20), 0.0)
    outputs, _ = run_ids(scheduler)
    assert (names(outputs.sequences), outputs.admission) == (["a"], AdmissionResult.OTHER)
    outputs, _ = run_ids(Scheduler(config()))
    assert outputs.admission is AdmissionResult.CONTINUE


def test_a_chunk_budget_leaves_room_in_the_step_for_the_next_prompt() -> None:
    scheduler = Scheduler(config(engine_type=EngineType.PROMPT, max_chunk_tokens=8))
    scheduler.add_sequence(sequence("long", 20), 0.0)
    scheduler.add_sequence(sequence("short", 4), 0.0)
    outputs, _ = run_ids(scheduler)
    assert names(outputs.sequences) == ["long", "short"]
    assert outputs.seqlens_q.tolist() == [8, 4]


@pytest.mark.parametrize("chunked_prefill", [True, False])
def test_prompts_that_are_judged_share_a_bound_in_each_step(chunked_prefill: bool) -> None:
    """What must stay whole is computed, but with nothing else that is judged."""
    scheduler = Scheduler(
        config(engine_type=EngineType.PROMPT, max_scored_tokens=6, chunked_prefill=chunked_prefill)
    )
    judged = [sequence(name, 8, prompt_logprobs=1) for name in "ab"]
    for each in (*judged, sequence("plain", 8)):
        scheduler.add_sequence(each, 0.0)
    steps = []
    for _ in range(3):
        outputs, _ = run_ids(scheduler)
        steps.append(dict(zip(names(outputs.sequences), outputs.seqlens_q.tolist(), strict=True)))
    if chunked_prefill:
        assert steps == [{"a": 6}, {"a": 2, "b": 4, "plain": 8}, {"b": 4}]
    else:
        assert steps == [{"a": 8}, {"b": 8, "plain": 8}, {}]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine_type": EngineType.PROMPT, "admission_estimate": True}, "engine_type=prompt"),
        ({"new_token_ratio_floor": 0.0}, "new_token_ratio_floor must be above 0"),
        ({"new_token_ratio_decay_steps": 0}, "new_token_ratio_decay_steps must be at least 1"),
        ({"max_chunk_tokens": 0}, "max_chunk_tokens=0 holds no chunk"),
        ({"max_scored_tokens": 0}, "max_scored_tokens=0 holds no chunk"),
        ({"max_chunk_tokens": 8, "chunked_prefill": False}, "without chunked prefill"),
    ],
)
def test_impossible_budgets_are_refused_by_name(changes, words) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**changes)


def test_under_half_the_pool_a_tenth_is_killed_at_nine_tenths_of_the_throughput() -> None:
    """Azure 2023 conversation lengths, a fixed max_tokens of 2,048, 32 clients, OPT-13B's step times."""
    ample = benchmark.run("2048", 32, 200, 20_000, estimate=False)
    off, on = (
        benchmark.run("2048", 32, 500, int(ample.mean_used / 2), estimate=estimate)
        for estimate in (False, True)
    )
    assert off.num_killed >= 8
    assert on.num_killed * 10 <= off.num_killed
    assert on.rate >= 0.9 * off.rate
    assert on.answered_rate >= 0.9 * off.answered_rate
