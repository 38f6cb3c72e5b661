"""Scheduling the next step before the results of the one that runs."""

import numpy as np
import pytest

from shared_scheduler import Scheduler, SchedulerError
from tests.shared_scheduler.builders import EOS, config, names, run_ids, sequence


def running(*lengths: int, max_tokens: int = 20, **changes: object) -> Scheduler:
    scheduler = Scheduler(config(**changes))
    for i, length in enumerate(lengths):
        scheduler.add_sequence(sequence("abcd"[i], length, max_tokens), 0.0)
    run_ids(scheduler)
    return scheduler


def test_the_next_step_takes_its_input_from_the_one_that_runs() -> None:
    scheduler = running(3, 6)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert second.batch is not None
    assert names(second.sequences) == ["b", "a"]
    assert second.batch.input_from_previous.tolist() == [0, 1]
    assert second.batch.token_ids.tolist() == [0, 0]
    assert second.batch.positions.tolist() == [7, 4]
    assert second.batch.seqlens_k.tolist() == [8, 5]
    assert second.batch.output_indices.tolist() == [2, 2]
    resolved = second.batch.resolve_inputs(np.array([30, 31]))
    assert resolved.token_ids.tolist() == [30, 31]
    assert resolved.input_from_previous.tolist() == [-1, -1]
    scheduler.process_outputs(first, np.array([30, 31]), now_s=0.0)


def test_tokens_in_flight_are_counted_when_blocks_are_taken() -> None:
    scheduler = running(3)
    scheduler.schedule()
    outputs = scheduler.schedule()
    (s,) = outputs.sequences
    assert (s.num_tokens, s.schedule.total_inflight_tokens, s.schedule.last_inflight_tokens) == (4, 2, 1)
    assert s.cache.block_table.tolist() == [1, 2]


def test_at_most_two_steps_are_in_flight() -> None:
    scheduler = running(3)
    scheduler.schedule()
    scheduler.schedule()
    with pytest.raises(SchedulerError, match="two steps are in flight"):
        scheduler.schedule()


def test_a_sequence_that_is_certain_to_end_is_not_scheduled_again() -> None:
    scheduler = running(3, 6, max_tokens=2)
    first = scheduler.schedule()
    assert len(first.sequences) == 2
    assert scheduler.schedule().is_empty


def test_output_behind_an_unforeseen_end_is_dropped_and_the_blocks_wait_for_it() -> None:
    scheduler = running(3, 6)
    first = scheduler.schedule()
    second = scheduler.schedule()
    results = scheduler.process_outputs(first, np.array([EOS, 8]), now_s=0.0)
    assert names(results.finished) == ["b"]
    assert scheduler.num_free_blocks == 4
    results = scheduler.process_outputs(second, np.array([9, 9]), now_s=0.0)
    assert results.num_appended.tolist() == [0, 1]
    assert results.token_ids.tolist() == [9]
    assert results.finished == ()
    assert scheduler.num_free_blocks == 6
    scheduler.check_invariants()


def test_a_sequence_preempted_in_flight_gives_its_blocks_back_with_its_results() -> None:
    scheduler = running(7, 7, num_blocks=5, stop_preempted_request=False)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert names(second.sequences) == []
    assert scheduler.num_free_blocks == 0
    victim = scheduler.get("a")
    assert victim is not None
    assert victim.is_in_flight
    results = scheduler.process_outputs(first, np.array([8, 8]), now_s=0.0)
    assert results.num_appended.tolist() == [0, 1]
    assert (scheduler.num_free_blocks, victim.num_tokens, victim.cache.num_tokens) == (2, 8, 0)
    scheduler.check_invariants()
