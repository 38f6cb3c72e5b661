import pytest

from shared_scheduler import Scheduler, SequenceStatus
from shared_scheduler.status import FINISH_REASONS
from tests.shared_scheduler.builders import config, run_ids, sequence


def test_statuses_are_ordered_so_that_finished_is_one_comparison() -> None:
    finished = [status.name for status in SequenceStatus if status.is_finished]
    assert [status.name for status in SequenceStatus] == ["WAITING", "RUNNING", "SWAPPED", *finished]
    assert all(name.startswith("FINISHED_") for name in finished)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (SequenceStatus.FINISHED_STOPPED, "stop"),
        (SequenceStatus.FINISHED_LENGTH_CAPPED, "length"),
        (SequenceStatus.FINISHED_ABORTED, "abort"),
        (SequenceStatus.FINISHED_IGNORED, "prompt_length_exceeded"),
        (SequenceStatus.FINISHED_PREEMPTED, "insufficient_system_resource"),
        (SequenceStatus.FINISHED_SO_FAILED, "structured_output_failed"),
        (SequenceStatus.FINISHED_VE_FAILED, "vision_encoder_failed"),
    ],
)
def test_every_ending_has_its_word(status: SequenceStatus, reason: str) -> None:
    s = sequence("a", 3)
    assert s.finish_reason is None
    s.finish(status)
    assert s.finish_reason == reason
    assert set(FINISH_REASONS) == {found for found in SequenceStatus if found.is_finished}


@pytest.mark.parametrize(("num_tokens", "blocks"), [(1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_needed_round_up(num_tokens: int, blocks: int) -> None:
    assert sequence("a", num_tokens).num_blocks_needed() == blocks


def test_blocks_needed_count_tokens_in_flight_and_drafts() -> None:
    scheduler = Scheduler(config(max_num_draft_tokens=3))
    s = sequence("a", 3)
    scheduler.add_sequence(s, 0.0)
    run_ids(scheduler)
    assert s.num_blocks_needed() == 1
    s.draft.token_ids = (1,)
    assert s.num_blocks_needed() == 2
    s.draft.clear()
    scheduler.schedule()
    assert s.num_blocks_needed() == 2


def test_the_in_flight_ledger_keeps_two_steps_apart() -> None:
    scheduler = Scheduler(config())
    s = sequence("a", 3)
    scheduler.add_sequence(s, 0.0)
    run_ids(scheduler)
    schedule = s.schedule
    schedule.start_inflight_step(3)
    schedule.start_inflight_step(2)
    assert (schedule.total_inflight_tokens, schedule.last_inflight_tokens) == (5, 2)
    schedule.finish_inflight_step()
    assert (schedule.total_inflight_tokens, schedule.last_inflight_tokens) == (2, 2)
    schedule.finish_inflight_step()
    assert (schedule.total_inflight_tokens, schedule.last_inflight_tokens) == (0, 0)


def test_committing_takes_back_what_was_rejected() -> None:
    scheduler = Scheduler(config())
    s = sequence("a", 3)
    scheduler.add_sequence(s, 0.0)
    run_ids(scheduler)
    assert s.cache.num_tokens == 3
    s.cache.advance_optimistically(4)
    assert (s.cache.num_tokens, s.cache.previous_num_tokens) == (7, 3)
    s.cache.commit_processed_tokens(2)
    assert s.cache.num_tokens == 5


def test_a_sequence_that_holds_nothing_has_no_blocks_and_no_slot() -> None:
    s = sequence("a", 3)
    assert s.cache.block_table.tolist() == []
    assert s.cache.state_id is None
    assert (s.row, s.num_tokens, s.last_token_id, s.output_token_ids) == (-1, 3, 12, [])
