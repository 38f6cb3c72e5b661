import numpy as np
import pytest

from shared_scheduler import CorruptionError, EngineType, RequestError, Scheduler, SequenceStatus
from tests.shared_scheduler.builders import (
    FakeWorker,
    config,
    drain,
    expected_output,
    names,
    next_token,
    sequence,
    step,
)
from wire.sampling import SamplingParams


def prefilled(num_prompt_tokens: int = 6, **changes: object) -> tuple[Scheduler, FakeWorker]:
    """A NORMAL engine in which request `a` has its first token."""
    scheduler = Scheduler(config(**({"num_blocks": 12} | changes)))  # type: ignore[arg-type]
    worker = FakeWorker(scheduler.config)
    scheduler.add_sequence(sequence("a", num_prompt_tokens, max_tokens=8, ignore_eos=True), 0.0)
    step(scheduler, worker)
    return scheduler, worker


def sampling(seed: int, max_tokens: int = 8) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)


def test_a_child_shares_the_blocks_of_what_is_cached() -> None:
    scheduler, _ = prefilled()
    parent = scheduler.get("a")
    assert parent is not None
    child = scheduler.fork(parent, "b", sampling(1), now_s=0.0)
    assert child.cache.block_table.tolist() == parent.cache.block_table.tolist() == [1, 2]
    assert (child.token_ids, child.cache.num_tokens) == (parent.token_ids, 6)
    assert child.schedule.branch_id == "_default"
    assert scheduler.num_free_blocks == 9
    scheduler.check_invariants()


def test_the_child_is_admitted_with_one_block_and_copies_the_half_written_tail() -> None:
    scheduler, worker = prefilled()
    parent = scheduler.get("a")
    assert parent is not None
    child = scheduler.fork(parent, "b", sampling(1), now_s=0.0)
    outputs, _ = step(scheduler, worker)
    assert outputs.clone_blocks == [(2, 3)]
    assert child.cache.block_table.tolist() == [1, 3]
    assert parent.cache.block_table.tolist() == [1, 2]
    assert child.schedule.branch_id == "default"
    assert names(outputs.sequences) == ["a", "b"]


def test_a_full_tail_needs_no_copy() -> None:
    scheduler, worker = prefilled(num_prompt_tokens=8)
    parent = scheduler.get("a")
    assert parent is not None
    scheduler.fork(parent, "b", sampling(1), now_s=0.0)
    outputs, _ = step(scheduler, worker)
    assert outputs.clone_blocks == []
    assert [s.cache.block_table.tolist() for s in outputs.sequences] == [[1, 2, 3], [1, 2, 4]]


def test_a_parent_that_writes_before_its_child_is_admitted_takes_the_copy() -> None:
    scheduler, worker = prefilled(max_num_seqs=1)
    parent = scheduler.get("a")
    assert parent is not None
    child = scheduler.fork(parent, "b", sampling(1), now_s=0.0)
    outputs, _ = step(scheduler, worker)
    assert names(outputs.sequences) == ["a"]
    assert outputs.clone_blocks == [(2, 3)]
    assert parent.cache.block_table.tolist() == [1, 3]
    assert child.cache.block_table.tolist() == [1, 2]
    assert {s.request_id for s in drain(scheduler, worker)} == {"a", "b"}


def test_n_branches_prefill_once_and_differ_by_their_seeds() -> None:
    """Own first tokens: the engine samples them all from the parent's logits."""
    scheduler, worker = prefilled(num_blocks=20)
    parent = scheduler.get("a")
    assert parent is not None
    prompt = parent.token_ids[:6]
    for seed in (1, 2, 3):
        first = next_token(prompt, seed)
        scheduler.fork(parent, f"seed {seed}", sampling(seed), output_token_ids=[first], now_s=0.0)
    ended = drain(scheduler, worker)
    assert {s.request_id for s in ended} == {"a", "seed 1", "seed 2", "seed 3"}
    for s in ended:
        assert s.output_token_ids == expected_output(prompt, s.sampling, 32)
    assert scheduler.num_free_blocks == 19


def test_a_child_without_output_samples_its_first_token_by_itself() -> None:
    scheduler, worker = prefilled()
    parent = scheduler.get("a")
    assert parent is not None
    child = scheduler.fork(parent, "b", sampling(1, max_tokens=3), output_token_ids=[], now_s=1.0)
    outputs, results = step(scheduler, worker, now_s=3.0)
    assert outputs.batch is not None
    assert outputs.batch.output_indices.tolist() == [1, 0]
    assert [(f.sequence.request_id, f.latency_s) for f in results.first_tokens] == [("b", 2.0)]
    drain(scheduler, worker)
    assert child.output_token_ids == expected_output(child.token_ids[:6], child.sampling, 32)


def test_a_child_of_a_half_computed_prompt_goes_to_the_head_of_the_queue() -> None:
    scheduler = Scheduler(config(num_blocks=20, max_num_batched_tokens=6))
    worker = FakeWorker(scheduler.config)
    scheduler.add_sequence(sequence("a", 14, max_tokens=3, ignore_eos=True), 0.0)
    step(scheduler, worker)
    parent = scheduler.get("a")
    assert parent is not None
    child = scheduler.fork(parent, "b", now_s=0.0)
    outputs, _ = step(scheduler, worker)
    assert names(outputs.sequences) == ["b"]
    assert outputs.seqlens_q.tolist() == [6]
    assert outputs.batch is not None
    assert outputs.batch.positions[0] == 6
    assert outputs.clone_blocks == [(2, 5)]
    assert outputs.num_cached_tokens == child.cache.hit_tokens == 6
    drain(scheduler, worker)
    assert (
        child.output_token_ids
        == parent.output_token_ids
        == expected_output(parent.token_ids[:14], parent.sampling, 32)
    )


def test_a_child_of_a_stateful_sequence_gets_a_copy_of_its_state() -> None:
    scheduler, worker = prefilled(num_state_slots=4)
    parent = scheduler.get("a")
    assert parent is not None
    child = scheduler.fork(parent, "b", sampling(1), now_s=0.0)
    assert child.cache.state_id == parent.cache.state_id == 1
    outputs, _ = step(scheduler, worker)
    assert outputs.clone_states == [(1, 2)]
    assert (parent.cache.state_id, child.cache.state_id) == (1, 2)
    drain(scheduler, worker)
    assert scheduler.num_free_slots == 3


def test_a_state_cannot_be_wound_back() -> None:
    scheduler, _ = prefilled(num_state_slots=4)
    parent = scheduler.get("a")
    assert parent is not None
    with pytest.raises(RequestError, match="cannot be wound back"):
        scheduler.fork(parent, "b", output_token_ids=[], now_s=0.0)


def test_a_child_that_dies_before_admission_gives_its_pins_back() -> None:
    scheduler, worker = prefilled(num_state_slots=4)
    parent = scheduler.get("a")
    assert parent is not None
    scheduler.fork(parent, "b", now_s=0.0)
    scheduler.abort("b")
    outputs, _ = step(scheduler, worker)
    assert names(outputs.finished) == ["b"]
    assert outputs.clone_blocks == [(2, 0)]
    assert outputs.clone_states == [(1, 0)]
    assert scheduler.num_free_blocks == 9


def test_forks_that_alone_fill_the_pool_give_way_to_each_other() -> None:
    scheduler, worker = prefilled(num_blocks=4, num_prompt_tokens=9)
    parent = scheduler.get("a")
    assert parent is not None
    scheduler.fork(parent, "b", sampling(1, max_tokens=2), now_s=0.0)
    scheduler.fork(parent, "c", sampling(2, max_tokens=2), now_s=0.0)
    scheduler.abort("a")
    ended = {s.request_id: s.status for s in drain(scheduler, worker)}
    assert ended == {
        "a": SequenceStatus.FINISHED_ABORTED,
        "b": SequenceStatus.FINISHED_LENGTH_CAPPED,
        "c": SequenceStatus.FINISHED_PREEMPTED,
    }


@pytest.mark.parametrize("engine_type", [EngineType.NORMAL, EngineType.PROMPT])
def test_a_parent_without_computed_blocks_cannot_be_forked(engine_type: EngineType) -> None:
    scheduler = Scheduler(config(engine_type=engine_type))
    parent = sequence("a", 5)
    scheduler.add_sequence(parent, 0.0)
    with pytest.raises(RequestError, match="holds no computed blocks"):
        scheduler.fork(parent, "b", now_s=0.0)
    scheduler.schedule()
    with pytest.raises(RequestError, match="nothing of it is computed"):
        scheduler.fork(parent, "b", now_s=0.0)


def test_a_completion_engine_forks_what_has_arrived() -> None:
    """One hand-over, several answers."""
    scheduler = Scheduler(config(engine_type=EngineType.COMPLETION, num_blocks=16))
    worker = FakeWorker(scheduler.config)
    parent = sequence("a", 6, max_tokens=5, ignore_eos=True)
    scheduler.reserve_remote(parent, 0.0)
    with pytest.raises(RequestError, match="holds no computed blocks"):
        scheduler.fork(parent, "b", now_s=0.0)
    worker.receive(parent)
    prompt = parent.token_ids
    scheduler.admit_arrived(parent, next_token(prompt, 0))
    child = scheduler.fork(parent, "b", sampling(4), output_token_ids=[next_token(prompt, 4)], now_s=0.0)
    drain(scheduler, worker)
    for s in (parent, child):
        assert s.output_token_ids == expected_output(prompt, s.sampling, 32)
    assert scheduler.num_free_blocks == 15


def test_a_write_into_a_shared_state_raises() -> None:
    scheduler, _ = prefilled(num_state_slots=4)
    holdings = scheduler._holdings
    assert holdings.states is not None
    holdings.states.pin([1])
    with pytest.raises(CorruptionError, match="a state slot that has another owner"):
        scheduler._batches.decode(scheduler._cohorts.of(holdings.rows.taken()), np.array([7], np.int32), None)


def test_forks_leave_those_who_run_the_blocks_for_their_next_token() -> None:
    """A hand-over of two full blocks, and room for two of five choices at a time."""
    scheduler = Scheduler(config(engine_type=EngineType.COMPLETION, num_blocks=5))
    worker = FakeWorker(scheduler.config)
    parent = sequence("a", 8, max_tokens=3, ignore_eos=True)
    scheduler.reserve_remote(parent, 0.0)
    worker.receive(parent)
    prompt = parent.token_ids
    scheduler.admit_arrived(parent, next_token(prompt, 0))
    for seed in (1, 2, 3, 4):
        first = [next_token(prompt, seed)]
        scheduler.fork(parent, f"b{seed}", sampling(seed, 3), output_token_ids=first, now_s=0.0)
    assert sorted(names(scheduler.schedule().sequences)) == ["a", "b1"]
