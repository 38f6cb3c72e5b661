"""The walk-through of the reference text with its exact numbers.

4 sequences, 2,048 tokens a step, block 16, 256 blocks (the null block among them), chunked prefill, preempted
requests end. Request A has 3,000 prompt tokens, B and C 500 each.
"""

import numpy as np
import pytest

from shared_scheduler import BlockManager, Scheduler, SequenceStatus
from tests.shared_scheduler.builders import config, names, run_ids, sequence


@pytest.fixture
def scheduler() -> Scheduler:
    built = Scheduler(
        config(
            block_size=16,
            num_blocks=256,
            max_num_seqs=4,
            max_num_batched_tokens=2048,
            max_model_len=8192,
            prefill_attempt_interval=70,
            prefill_any_attempt_interval=100,
        )
    )
    built.add_sequence(sequence("A", 3000, max_tokens=3000, block_size=16), 0.0)
    return built


def add_b_and_c(scheduler: Scheduler) -> None:
    for name in ("B", "C"):
        scheduler.add_sequence(sequence(name, 500, max_tokens=3000, block_size=16), 0.0)


def test_first_step_cuts_a_at_the_budget_and_takes_all_its_blocks(scheduler: Scheduler) -> None:
    outputs, _ = run_ids(scheduler)
    a = scheduler.get("A")
    assert a is not None
    assert outputs.prompt_run
    assert names(outputs.sequences) == ["A"]
    assert outputs.seqlens_q.tolist() == [2048]
    assert a.cache.block_table.tolist() == list(range(1, 189))
    assert scheduler.num_free_blocks == 255 - 188
    assert a.schedule.chunked_rest_len == 952
    assert a.status is SequenceStatus.WAITING


def test_second_step_finishes_a_and_takes_b_and_c_whole(scheduler: Scheduler) -> None:
    run_ids(scheduler)
    add_b_and_c(scheduler)
    outputs, _ = run_ids(scheduler)
    assert names(outputs.sequences) == ["A", "B", "C"]
    assert outputs.seqlens_q.tolist() == [952, 500, 500]
    assert outputs.batch is not None
    assert outputs.batch.seqlens_k.tolist() == [3000, 500, 500]
    assert all(s.status is SequenceStatus.RUNNING for s in outputs.sequences)


def test_third_step_decodes_all_three_without_new_blocks(scheduler: Scheduler) -> None:
    run_ids(scheduler)
    add_b_and_c(scheduler)
    run_ids(scheduler)
    num_free = scheduler.num_free_blocks
    outputs, _ = run_ids(scheduler)
    assert not outputs.prompt_run
    assert outputs.seqlens_q.tolist() == [1, 1, 1]
    assert scheduler.num_free_blocks == num_free


def test_usage_of_a_pool_with_20_free_blocks_is_above_the_watermark() -> None:
    blocks = BlockManager(256)
    blocks.allocate(blocks.num_free - 20)
    assert round(blocks.usage(), 2) == 0.92
    assert blocks.usage() > config().prefill_watermark


def test_a_full_pool_starts_no_prompt(scheduler: Scheduler) -> None:
    run_ids(scheduler)
    add_b_and_c(scheduler)
    run_ids(scheduler)
    assert scheduler.usage > 0.9
    scheduler.add_sequence(sequence("D", 5, block_size=16), 0.0)
    for _ in range(71):
        outputs, _ = run_ids(scheduler)
        if not outputs.sequences or scheduler.usage <= 0.9:
            break
        assert not outputs.prompt_run


def test_a_is_the_victim_when_blocks_run_out(scheduler: Scheduler) -> None:
    run_ids(scheduler)
    add_b_and_c(scheduler)
    run_ids(scheduler)
    a = scheduler.get("A")
    assert a is not None
    outputs, _ = run_ids(scheduler)
    while not outputs.ignored:
        outputs, _ = run_ids(scheduler)
    assert names(outputs.ignored) == ["A"]
    assert sorted(names(outputs.sequences)) == ["B", "C"]
    assert a.finish_reason == "insufficient_system_resource"
    assert a.cache.block_table.size == 0
    assert scheduler.num_free_blocks == 255 - 2 * 33


def test_a_newcomer_waits_for_the_next_attempt(scheduler: Scheduler) -> None:
    run_ids(scheduler)
    run_ids(scheduler)
    run_ids(scheduler)
    scheduler.add_sequence(sequence("D", 5, block_size=16), 0.0)
    kinds = [run_ids(scheduler)[0].prompt_run for _ in range(70)]
    assert kinds.index(True) == 69
    assert np.count_nonzero(kinds) == 1
