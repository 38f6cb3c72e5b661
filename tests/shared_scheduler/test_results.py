import numpy as np
import pytest

from shared_scheduler import Scheduler, SchedulerError
from tests.shared_scheduler.builders import EOS, config, names, run_ids, sequence


def started(max_tokens: int = 20, **changes: object) -> Scheduler:
    scheduler = Scheduler(config())
    scheduler.add_sequence(sequence("a", 5, max_tokens, **changes), 10.0)
    return scheduler


@pytest.mark.parametrize("count", [1, 2, 3])
def test_max_tokens_gives_exactly_so_many(count: int) -> None:
    scheduler = started(max_tokens=count)
    for _ in range(count):
        _, results = run_ids(scheduler)
    assert [(s.finish_reason, s.output_token_ids) for s in results.finished] == [("length", [7] * count)]
    assert not scheduler.has_work()


def test_end_of_sequence_stops_even_as_the_first_token() -> None:
    scheduler = started()
    _, results = run_ids(scheduler, EOS)
    assert [(s.finish_reason, s.output_token_ids) for s in results.finished] == [("stop", [EOS])]
    assert scheduler.num_free_blocks == 8


def test_end_of_sequence_can_be_ignored() -> None:
    scheduler = started(ignore_eos=True)
    for _ in range(3):
        _, results = run_ids(scheduler, EOS)
        assert results.finished == ()


def test_stop_ids_stop_where_end_of_sequence_is_ignored() -> None:
    scheduler = started(ignore_eos=True, stop_token_ids=(3,))
    run_ids(scheduler, EOS)
    _, results = run_ids(scheduler, 3)
    assert [s.finish_reason for s in results.finished] == ["stop"]


def test_end_of_sequence_wins_over_length() -> None:
    scheduler = started(max_tokens=1)
    _, results = run_ids(scheduler, EOS)
    assert results.finished[0].finish_reason == "stop"


def test_the_model_length_ends_a_sequence_with_the_token_that_exceeds_it() -> None:
    scheduler = Scheduler(config(max_model_len=8))
    scheduler.add_sequence(sequence("a", 5), 0.0)
    while scheduler.has_work():
        _, results = run_ids(scheduler)
    assert [(s.finish_reason, s.num_tokens) for s in results.finished] == [("length", 9)]


def test_the_latency_of_a_first_token_is_measured_from_arrival() -> None:
    scheduler = started()
    outputs = scheduler.schedule()
    results = scheduler.process_outputs(outputs, np.array([7]), now_s=12.5)
    assert [(f.sequence.request_id, f.latency_s) for f in results.first_tokens] == [("a", 2.5)]
    assert run_ids(scheduler)[1].first_tokens == ()


def test_every_scheduled_sequence_has_one_place_in_the_results() -> None:
    scheduler = Scheduler(config(max_num_batched_tokens=8))
    scheduler.add_sequence(sequence("a", 5), 0.0)
    scheduler.add_sequence(sequence("b", 9), 0.0)
    outputs, results = run_ids(scheduler)
    assert names(outputs.sequences) == ["a", "b"]
    assert results.num_appended.tolist() == [1, 0]
    assert results.offsets.tolist() == [0, 1]
    assert results.token_ids.tolist() == [7]


def test_tokens_are_right_whenever_they_are_read() -> None:
    """Longer than the buffer of newest tokens, read in between."""
    scheduler = Scheduler(config(max_model_len=1400, num_blocks=400))
    s = sequence("a", 3, max_tokens=1300)
    scheduler.add_sequence(s, 0.0)
    expected = s.token_ids
    for i in range(1300):
        run_ids(scheduler, 2 + i)
        expected.append(2 + i)
        assert s.last_token_id == expected[-1]
        if i % 97 == 0 or i > 1290:
            assert s.token_ids == expected
            assert s.output_token_ids == expected[3:]
    assert s.token_ids == expected
    assert s.is_finished


def test_results_out_of_order_are_refused() -> None:
    scheduler = started()
    run_ids(scheduler)
    first = scheduler.schedule()
    second = scheduler.schedule()
    with pytest.raises(SchedulerError, match="out of order"):
        scheduler.process_outputs(second, np.array([7]), now_s=0.0)
    scheduler.process_outputs(first, np.array([7]), now_s=0.0)
    scheduler.process_outputs(second, np.array([7]), now_s=0.0)
    with pytest.raises(SchedulerError, match="out of order"):
        scheduler.process_outputs(second, np.array([7]), now_s=0.0)


def test_a_wrong_number_of_results_is_refused() -> None:
    scheduler = started()
    outputs = scheduler.schedule()
    with pytest.raises(SchedulerError, match="2 sampled ids for 1 sequences"):
        scheduler.process_outputs(outputs, np.array([7, 7]), now_s=0.0)
