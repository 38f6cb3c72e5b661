import pytest

from shared_scheduler import AllocStatus, EngineType, RequestError, Scheduler, SchedulerError
from tests.shared_scheduler.builders import (
    EOS,
    FakeWorker,
    config,
    expected_output,
    names,
    next_token,
    sequence,
    step,
)


def completion_engine(**changes: object) -> Scheduler:
    return Scheduler(config(engine_type=EngineType.COMPLETION, remote_growth_tokens=4, **changes))


def test_reserving_takes_blocks_for_the_whole_prompt() -> None:
    scheduler = completion_engine(num_state_slots=3)
    s = sequence("a", 9)
    assert scheduler.reserve_remote(s, 0.0) is AllocStatus.OK
    assert s.cache.block_table.tolist() == [1, 2, 3]
    assert s.cache.state_id == 1
    assert (scheduler.num_free_blocks, scheduler.num_free_slots, scheduler.num_waiting) == (5, 1, 1)
    assert not scheduler.has_work()


@pytest.mark.parametrize(("num_tokens", "valid_start"), [(5, 0), (7, 0), (8, 4), (11, 4), (12, 8), (30, 24)])
def test_blocks_wholly_before_the_window_of_the_next_token_need_not_come(
    num_tokens: int, valid_start: int
) -> None:
    """Window 5, blocks of 4: the token at position n sees the keys from n - 4 on."""
    scheduler = completion_engine(sliding_window=5, num_blocks=20)
    s = sequence("a", num_tokens)
    assert scheduler.reserve_remote(s, 0.0) is AllocStatus.OK
    assert s.cache.swa_valid_start == valid_start
    assert s.cache.block_table.size == -(-num_tokens // 4)


def test_a_fork_knows_which_of_the_shared_blocks_hold_nothing() -> None:
    scheduler = completion_engine(sliding_window=5, num_blocks=20)
    parent = sequence("a", 12, max_tokens=4, ignore_eos=True)
    scheduler.reserve_remote(parent, 0.0)
    scheduler.admit_arrived(parent, 7)
    child = scheduler.fork(parent, "b", output_token_ids=(9,), now_s=0.0)
    assert child.cache.swa_valid_start == parent.cache.swa_valid_start == 8


def test_an_arrival_decodes_from_output_index_one() -> None:
    scheduler = completion_engine()
    worker = FakeWorker(scheduler.config)
    s = sequence("a", 9, max_tokens=4, ignore_eos=True)
    scheduler.reserve_remote(s, 0.0)
    worker.receive(s)
    first = next_token(s.token_ids, 0)
    scheduler.admit_arrived(s, first)
    assert s.output_token_ids == [first]
    assert scheduler.has_work()
    outputs, _ = step(scheduler, worker)
    assert outputs.batch is not None
    assert outputs.batch.output_indices.tolist() == [1]
    assert outputs.batch.seqlens_k.tolist() == [10]
    while scheduler.has_work():
        step(scheduler, worker)
    assert s.output_token_ids == expected_output(s.token_ids[:9], s.sampling, 32)
    assert scheduler.num_free_blocks == 8


@pytest.mark.parametrize(("token", "max_tokens", "reason"), [(EOS, 9, "stop"), (7, 1, "length")])
def test_a_first_token_that_ends_the_request_ends_it(token: int, max_tokens: int, reason: str) -> None:
    scheduler = completion_engine()
    s = sequence("a", 9, max_tokens)
    scheduler.reserve_remote(s, 0.0)
    scheduler.admit_arrived(s, token)
    outputs = scheduler.schedule()
    assert [(f.request_id, f.finish_reason) for f in outputs.finished] == [("a", reason)]
    assert outputs.is_empty
    assert scheduler.num_free_blocks == 8


def test_room_for_one_sequence_to_grow_is_never_given_away() -> None:
    scheduler = completion_engine()
    assert scheduler.reserve_remote(sequence("a", 16), 0.0) is AllocStatus.OK
    assert scheduler.reserve_remote(sequence("b", 16), 0.0) is AllocStatus.LATER
    assert scheduler.reserve_remote(sequence("c", 12), 0.0) is AllocStatus.OK
    assert scheduler.num_free_blocks == 1


def test_no_growth_is_reserved_for_a_sequence_that_is_about_to_end() -> None:
    scheduler = completion_engine()
    assert scheduler.reserve_remote(sequence("a", 16, max_tokens=1), 0.0) is AllocStatus.OK
    assert scheduler.reserve_remote(sequence("b", 16, max_tokens=1), 0.0) is AllocStatus.OK


def test_a_sequence_that_fills_the_pool_is_taken_when_it_is_alone() -> None:
    scheduler = completion_engine()
    assert scheduler.reserve_remote(sequence("a", 31), 0.0) is AllocStatus.OK


@pytest.mark.parametrize("length", [32, 33])
def test_a_sequence_that_can_never_fit_is_refused(length: int) -> None:
    scheduler = completion_engine()
    s = sequence("a", length)
    assert scheduler.reserve_remote(s, 0.0) is AllocStatus.NEVER
    assert scheduler.get("a") is None
    assert scheduler.num_free_blocks == 8


def test_without_a_slot_nothing_is_reserved() -> None:
    scheduler = completion_engine(num_state_slots=2)
    scheduler.reserve_remote(sequence("a", 3), 0.0)
    assert scheduler.reserve_remote(sequence("b", 3), 0.0) is AllocStatus.LATER
    assert scheduler.num_free_blocks == 7


def test_a_dropped_sequence_gives_everything_back() -> None:
    scheduler = completion_engine()
    s = sequence("a", 9)
    scheduler.reserve_remote(s, 0.0)
    scheduler.drop_remote(s, "error")
    assert s.finish_reason == "error"
    assert scheduler.num_free_blocks == 8
    with pytest.raises(SchedulerError, match="not waiting for remote KV"):
        scheduler.drop_remote(s)


def test_an_abort_before_arrival_keeps_the_blocks_until_it_is_dropped() -> None:
    scheduler = completion_engine()
    s = sequence("a", 9)
    scheduler.reserve_remote(s, 0.0)
    scheduler.abort("a")
    assert scheduler.schedule().finished == ()
    assert scheduler.num_free_blocks == 5
    scheduler.drop_remote(s)
    assert s.finish_reason == "abort"
    assert scheduler.num_free_blocks == 8


def test_an_aborted_sequence_that_arrives_goes_straight_to_finished() -> None:
    scheduler = completion_engine()
    s = sequence("a", 9)
    scheduler.reserve_remote(s, 0.0)
    scheduler.abort("a")
    scheduler.admit_arrived(s, 7)
    assert s.output_token_ids == []
    assert names(scheduler.schedule().finished) == ["a"]
    assert scheduler.num_free_blocks == 8


def test_arrivals_wait_for_a_place_in_the_batch() -> None:
    scheduler = completion_engine(max_num_seqs=1)
    for name in ("a", "b"):
        s = sequence(name, 3)
        scheduler.reserve_remote(s, 0.0)
        scheduler.admit_arrived(s, 7)
    assert names(scheduler.schedule().sequences) == ["a"]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)


def test_only_a_completion_engine_reserves() -> None:
    with pytest.raises(RequestError, match="prompt engine: use add_sequence"):
        Scheduler(config(engine_type=EngineType.PROMPT)).reserve_remote(sequence("a", 3), 0.0)
