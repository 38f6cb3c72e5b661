import numpy as np
import pytest

from shared_scheduler import CorruptionError, EngineType, Scheduler, SequenceStatus
from shared_scheduler.ledgers import StructuredLedger
from tests.shared_scheduler.builders import FakeWorker, config, drain, names, run_ids, sequence, step


def running(*lengths: int, max_tokens: int = 20, **changes: object) -> Scheduler:
    """A NORMAL engine whose sequences a, b, ... have just been prefilled."""
    scheduler = Scheduler(config(**changes))
    for i, length in enumerate(lengths):
        scheduler.add_sequence(sequence("abcdefgh"[i], length, max_tokens), 0.0)
    while scheduler.num_waiting:
        run_ids(scheduler)
    return scheduler


def test_the_batch_is_ordered_longest_first() -> None:
    scheduler = running(3, 7, 5)
    outputs, _ = run_ids(scheduler)
    assert names(outputs.sequences) == ["b", "c", "a"]
    assert outputs.batch is not None
    assert outputs.batch.seqlens_k.tolist() == [8, 6, 4]


def test_a_block_is_taken_exactly_when_it_is_needed() -> None:
    scheduler = running(3)
    tables = []
    for _ in range(6):
        outputs, _ = run_ids(scheduler)
        tables.append(outputs.sequences[0].cache.block_table.tolist())
    assert tables == [[1], [1, 2], [1, 2], [1, 2], [1, 2], [1, 2, 3]]


def test_ended_sequences_give_everything_back_with_their_results() -> None:
    scheduler = running(3, 3, max_tokens=2)
    _, results = run_ids(scheduler)
    assert sorted(names(results.finished)) == ["a", "b"]
    assert scheduler.num_free_blocks == 8
    assert not scheduler.has_work()


def test_the_longest_output_is_preempted_for_the_block_of_a_shorter_one() -> None:
    scheduler = running(8, num_blocks=7, max_num_seqs=2)
    for _ in range(3):
        run_ids(scheduler)
    scheduler.add_sequence(sequence("b", 11), 0.0)
    run_ids(scheduler)
    outputs, _ = run_ids(scheduler)
    assert names(outputs.sequences) == ["a", "b"]
    outputs, _ = run_ids(scheduler)
    assert names(outputs.sequences) == ["b"]
    assert [(s.request_id, s.finish_reason) for s in outputs.ignored] == [
        ("a", "insufficient_system_resource")
    ]


def test_a_sequence_that_needs_no_block_is_not_preempted_for_one() -> None:
    """The reference preempts `a` here, although `b` writes into a block it has."""
    scheduler = running(9, 10, num_blocks=7)
    assert scheduler.num_free_blocks == 0
    outputs, _ = run_ids(scheduler)
    assert names(outputs.sequences) == ["b", "a"]
    assert outputs.ignored == ()


def test_the_reference_preempts_without_need() -> None:
    scheduler = running(9, 10, num_blocks=7, preempt_only_on_need=False)
    assert scheduler.num_free_blocks == 0
    outputs, _ = run_ids(scheduler)
    assert len(outputs.ignored) == 1


def test_the_last_sequence_preempts_itself() -> None:
    scheduler = running(8, num_blocks=4)
    outputs, _ = run_ids(scheduler)
    while outputs.sequences:
        outputs, _ = run_ids(scheduler)
    assert names(outputs.ignored) == ["a"]
    assert outputs.ignored[0].num_tokens == 13


def test_a_preempted_sequence_is_computed_again_from_the_head_of_the_queue() -> None:
    scheduler = Scheduler(config(num_blocks=6, stop_preempted_request=False))
    worker = FakeWorker(scheduler.config)
    for name, length in (("a", 8), ("b", 7)):
        scheduler.add_sequence(sequence(name, length, max_tokens=6, ignore_eos=True), 0.0)
    step(scheduler, worker)
    while scheduler.num_running == 2:
        step(scheduler, worker)
    victim = next(
        s for s in (scheduler.get("a"), scheduler.get("b")) if s and s.status is SequenceStatus.WAITING
    )
    assert victim.cache.num_tokens == 0
    assert victim.cache.block_table.size == 0
    assert victim.num_output_tokens > 0
    assert {s.finish_reason for s in drain(scheduler, worker)} == {"length"}


def test_structured_output_that_has_started_is_never_computed_again() -> None:
    scheduler = Scheduler(config(num_blocks=4, stop_preempted_request=False))
    scheduler.add_sequence(sequence("a", 8, structured=StructuredLedger(started=True)), 0.0)
    outputs, _ = run_ids(scheduler)
    while not outputs.ignored:
        outputs, _ = run_ids(scheduler)
    assert outputs.ignored[0].status is SequenceStatus.FINISHED_PREEMPTED


def test_an_aborted_sequence_is_swept_by_the_next_step() -> None:
    scheduler = running(3, 3)
    scheduler.abort("a")
    scheduler.abort("a")
    scheduler.abort("nobody")
    outputs, _ = run_ids(scheduler)
    assert names(outputs.finished) == ["a"]
    assert names(outputs.sequences) == ["b"]
    assert scheduler.num_free_blocks == 7


def test_an_abort_in_flight_keeps_the_blocks_until_the_results_are_in() -> None:
    scheduler = running(3)
    outputs = scheduler.schedule()
    scheduler.abort("a")
    assert scheduler.num_free_blocks == 7
    results = scheduler.process_outputs(outputs, np.array([7]), now_s=0.0)
    assert names(results.finished) == ["a"]
    assert results.num_appended.tolist() == [0]
    assert scheduler.num_free_blocks == 8
    assert scheduler.schedule().finished == ()


def test_prompts_are_tried_at_all_points_only() -> None:
    scheduler = running(3, prefill_attempt_interval=4, prefill_any_attempt_interval=100)
    run_ids(scheduler)
    scheduler.add_sequence(sequence("late", 3), 0.0)
    assert [run_ids(scheduler)[0].prompt_run for _ in range(4)] == [False, False, False, True]


def test_no_prompt_is_started_above_the_watermark() -> None:
    scheduler = running(30, num_blocks=10, max_model_len=40)
    assert scheduler.usage > 0.8
    scheduler.add_sequence(sequence("late", 1), 0.0)
    run_ids(scheduler)
    assert scheduler.num_running == 2
    scheduler.add_sequence(sequence("later", 1), 0.0)
    assert scheduler.usage > 0.9
    assert not run_ids(scheduler)[0].prompt_run


def test_a_half_computed_prompt_goes_on_above_the_watermark() -> None:
    """In the reference it waits for ever: nothing runs, so nothing is ever freed."""
    scheduler = Scheduler(config(num_blocks=9, max_num_batched_tokens=16))
    scheduler.add_sequence(sequence("a", 31), 0.0)
    run_ids(scheduler)
    assert scheduler.usage > 0.9
    outputs, _ = run_ids(scheduler)
    assert outputs.seqlens_q.tolist() == [15]


def test_a_table_that_does_not_cover_a_write_raises() -> None:
    scheduler = running(3)
    rows = scheduler._holdings.rows
    rows.tables[rows.taken()[0], 0] = 0
    with pytest.raises(CorruptionError, match="does not cover"):
        scheduler.schedule()


def test_a_write_into_a_shared_block_raises() -> None:
    scheduler = running(3)
    holdings = scheduler._holdings
    rows = holdings.rows.taken()
    holdings.blocks.pin(holdings.rows.table(int(rows[0])))
    cohort = scheduler._cohorts.of(rows)
    with pytest.raises(CorruptionError, match="another owner"):
        scheduler._batches.decode(cohort, np.array([4], np.int32), None)


def test_a_completion_engine_takes_no_prompts() -> None:
    scheduler = Scheduler(config(engine_type=EngineType.COMPLETION))
    with pytest.raises(ValueError, match="reserve_remote"):
        scheduler.add_sequence(sequence("a", 3), 0.0)
