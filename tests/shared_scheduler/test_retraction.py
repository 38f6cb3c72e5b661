"""Retraction by lowest cost: who gives way, who never does."""

import pytest

from shared_scheduler import ConfigError, Scheduler, SequenceStatus
from tests.shared_scheduler.builders import (
    FakeWorker,
    config,
    drain,
    expected_output,
    names,
    run_ids,
    sequence,
)
from wire.sampling import SamplingParams


def normal(**changes) -> Scheduler:
    """8 blocks of 4 tokens, recompute."""
    return Scheduler(config(stop_preempted_request=False, retract_cheapest=True, **changes))


def test_the_fewest_outputs_then_the_longest_input_give_way() -> None:
    """a has more output than b and c; of those, c has the longer input and goes. 3 + 2 + 3 blocks."""
    scheduler = normal()
    scheduler.add_sequence(sequence("a", 9), 0.0)
    for _ in range(2):
        run_ids(scheduler)
    scheduler.add_sequence(sequence("b", 7), 0.0)
    scheduler.add_sequence(sequence("c", 11), 0.0)
    outputs, _ = run_ids(scheduler)
    assert names(outputs.sequences) == ["b", "c"]
    assert scheduler.num_free_blocks == 0
    outputs, _ = run_ids(scheduler)  # now b has 8 + 1 tokens and needs a third block
    assert names(outputs.sequences) == ["c", "a", "b"]
    outputs, _ = run_ids(scheduler)
    assert names(outputs.sequences) == ["a", "b"]
    waiting = scheduler.get("c")
    assert waiting is not None
    assert (waiting.status, waiting.num_output_tokens) == (SequenceStatus.WAITING, 2)


def test_without_the_option_the_longest_output_gives_way() -> None:
    scheduler = Scheduler(config(stop_preempted_request=False))
    scheduler.add_sequence(sequence("a", 9), 0.0)
    for _ in range(2):
        run_ids(scheduler)
    scheduler.add_sequence(sequence("b", 7), 0.0)
    scheduler.add_sequence(sequence("c", 11), 0.0)
    for _ in range(3):
        outputs, _ = run_ids(scheduler)
    assert names(outputs.sequences) == ["c", "b"]


def test_the_last_one_running_ends_only_if_the_pool_cannot_hold_it_alone() -> None:
    scheduler = normal(max_model_len=100, num_blocks=5)
    scheduler.add_sequence(sequence("a", 10), 0.0)
    for _ in range(20):
        outputs, _ = run_ids(scheduler)
        if outputs.ignored:
            break
    (a,) = outputs.ignored
    assert (a.status, a.num_tokens) == (SequenceStatus.FINISHED_PREEMPTED, 17)
    assert scheduler.num_free_blocks == 4


def test_half_computed_prompts_give_way_to_the_last_one_running() -> None:
    """a fills 3 blocks and needs a fourth; the first chunk of a prompt of 20 tokens has taken the other 5."""
    scheduler = normal(max_num_batched_tokens=11, prefill_attempt_interval=2)
    scheduler.add_sequence(sequence("a", 11), 0.0)
    run_ids(scheduler)
    long = sequence("long", 20)
    scheduler.add_sequence(long, 0.0)
    while not long.holds_blocks:
        outputs, _ = run_ids(scheduler)
    assert (names(outputs.sequences), outputs.seqlens_q.tolist()) == (["long"], [11])
    assert scheduler.num_free_blocks == 0
    long.schedule.schedulable = False  # for one reason or another it does not go on
    for _ in range(2):
        outputs, _ = run_ids(scheduler)
        assert names(outputs.sequences) == ["a"]
    assert (long.holds_blocks, long.status) == (False, SequenceStatus.WAITING)
    assert not outputs.ignored


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_forced_retraction_changes_no_answer(interval: int) -> None:
    settings = config(
        stop_preempted_request=False,
        retract_cheapest=True,
        test_retract_interval=interval,
        num_blocks=40,
        prefill_attempt_interval=2,
    )
    scheduler, worker = Scheduler(settings), FakeWorker(settings)
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    load = [sequence(name, length, 6, ignore_eos=True) for name, length in (("a", 5), ("b", 9), ("c", 2))]
    for s in load:
        scheduler.add_sequence(s, 0.0)
    ended = drain(scheduler, worker)
    assert sorted(names(ended)) == ["a", "b", "c"]
    for s in load:
        assert s.output_token_ids == expected_output(s.token_ids[: s.num_prompt_tokens], sampling, 32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"retract_cheapest": True, "preempt_only_on_need": False}, "preempt_only_on_need=False"),
        ({"test_retract_interval": 3}, "would end requests"),
        (
            {"test_retract_interval": 0, "retract_cheapest": True, "stop_preempted_request": False},
            "at least 1",
        ),
    ],
)
def test_contradictions_are_refused(changes, words) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**changes)
