import numpy as np
import pytest

from shared_scheduler import Scheduler, Sequence
from shared_scheduler.drafts import accepted_prefixes
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


def prefilled(*lengths: int, **changes: object) -> tuple[Scheduler, FakeWorker, list[Sequence]]:
    scheduler = Scheduler(config(**({"num_blocks": 20, "max_num_draft_tokens": 3} | changes)))
    worker = FakeWorker(scheduler.config)
    for i, length in enumerate(lengths):
        scheduler.add_sequence(sequence("abcd"[i], length, max_tokens=12, ignore_eos=True), 0.0)
    outputs, _ = step(scheduler, worker)
    return scheduler, worker, list(outputs.sequences)


def drafts_for(s: Sequence, num_right: int, count: int = 3) -> list[int]:
    tokens = s.token_ids
    for i in range(count):
        right = next_token(tokens, s.sampling.seed)
        tokens.append(right if i < num_right else right + 1)
    return tokens[s.num_tokens :]


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_the_accepted_prefix_and_the_sampled_token_are_appended(num_right: int) -> None:
    scheduler, worker, (s,) = prefilled(5)
    scheduler.set_drafts(s, drafts_for(s, num_right))
    outputs, results = step(scheduler, worker)
    assert outputs.seqlens_q.tolist() == [4]
    assert results.num_appended.tolist() == [num_right + 1]
    assert s.num_tokens == 7 + num_right
    assert s.cache.num_tokens == s.num_tokens - 1
    assert (s.draft.num_accepted, s.draft.num_proposed) == (num_right, 3)
    drain(scheduler, worker)
    assert s.output_token_ids == expected_output(s.token_ids[:5], s.sampling, 32)


def test_blocks_cover_the_drafts_and_shrink_after_a_rejection() -> None:
    scheduler, worker, (s,) = prefilled(7)
    scheduler.set_drafts(s, drafts_for(s, 0))
    outputs = scheduler.schedule()
    assert s.cache.block_table.tolist() == [1, 2, 3]
    assert outputs.batch is not None
    assert outputs.batch.positions.tolist() == [7, 8, 9, 10]
    assert outputs.batch.slot_mapping.tolist() == [11, 12, 13, 14]
    assert outputs.batch.seqlens_k.tolist() == [11]
    sampled, accepted = worker.run(outputs, outputs.batch)
    scheduler.process_outputs(outputs, np.array(sampled), np.array(accepted), now_s=0.0)
    assert s.num_tokens == 9
    step(scheduler, worker)
    step(scheduler, worker)
    assert s.cache.block_table.tolist() == [1, 2, 3]
    assert s.num_tokens == 11


def test_nothing_is_appended_after_the_token_that_ends_the_request() -> None:
    scheduler, worker, _ = prefilled(5)
    s = sequence("b", 5, max_tokens=100, stop_token_ids=(next_token([*range(10, 15), 0], 0),))
    scheduler.add_sequence(s, 0.0)
    while s.num_output_tokens < 1:
        step(scheduler, worker)
    drafts = drafts_for(s, 3)
    stop = Sequence(
        "c", s.token_ids, type(s.sampling)(max_tokens=50, stop_token_ids=(drafts[1],)), block_size=4
    )
    scheduler.add_sequence(stop, 0.0)
    while stop.num_output_tokens < 1:
        step(scheduler, worker)
    if not stop.is_finished:
        scheduler.set_drafts(stop, drafts_for(stop, 3))
        drain(scheduler, worker)
    assert stop.output_token_ids.count(drafts[1]) == 1
    assert stop.output_token_ids[-1] == drafts[1]


def test_no_more_is_drafted_than_may_be_appended() -> None:
    scheduler, worker, _ = prefilled(5)
    s = sequence("b", 5, max_tokens=3, ignore_eos=True)
    scheduler.add_sequence(s, 0.0)
    while not s.num_output_tokens:
        step(scheduler, worker)
    scheduler.set_drafts(s, drafts_for(s, 3))
    outputs, results = step(scheduler, worker)
    assert outputs.seqlens_q[names(outputs.sequences).index("b")] == 2
    assert names(results.finished) == ["b"]
    assert s.num_output_tokens == 3


def test_drafts_are_dropped_before_anybody_is_preempted() -> None:
    scheduler, worker, (s,) = prefilled(7, num_blocks=3)
    scheduler.set_drafts(s, drafts_for(s, 3))
    outputs, _ = step(scheduler, worker)
    assert outputs.seqlens_q.tolist() == [1]
    assert outputs.ignored == ()


def test_drafts_for_a_sequence_that_does_not_decode_are_ignored() -> None:
    scheduler = Scheduler(config(max_num_draft_tokens=3))
    s = sequence("a", 5)
    scheduler.add_sequence(s, 0.0)
    scheduler.set_drafts(s, [1, 2, 3])
    assert s.draft.token_ids == ()


@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_drafts_behind_a_token_in_flight_are_verified_where_it_will_stand(num_right: int) -> None:
    """Two steps with drafts in flight at once; the second moves back by what the first rejects."""
    scheduler, worker, (s,) = prefilled(6, num_blocks=30, max_model_len=64)
    drafts = drafts_for(s, 7, count=7)
    scheduler.set_drafts(s, [*drafts[:num_right], *(1 + t for t in drafts[num_right:3])])
    first = scheduler.schedule()
    scheduler.set_drafts(s, [*drafts[4:7]])
    second = scheduler.schedule()
    assert first.batch is not None
    assert second.batch is not None
    assert second.batch.positions.tolist() == [10, 11, 12, 13]
    sampled, accepted = worker.run(first, first.batch)
    scheduler.process_outputs(first, np.array(sampled), np.array(accepted), now_s=0.0)
    batch = second.batch.resolve_inputs(np.array(sampled), np.array([3 - num_right], np.int32))
    assert batch.positions.tolist() == [7 + num_right + i for i in range(4)]
    sampled, accepted = worker.run(second, batch)
    results = scheduler.process_outputs(second, np.array(sampled), np.array(accepted), now_s=0.0)
    assert results.num_appended[0] == (4 if num_right == 3 else 1)
    drain(scheduler, worker)
    assert s.output_token_ids == expected_output(s.token_ids[:6], s.sampling, 64)


def test_a_step_behind_one_with_drafts_is_moved_back_by_what_was_rejected() -> None:
    scheduler, worker, (s,) = prefilled(6)
    scheduler.set_drafts(s, drafts_for(s, 1))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert first.batch is not None
    assert second.batch is not None
    assert second.batch.positions.tolist() == [10]
    sampled, accepted = worker.run(first, first.batch)
    scheduler.process_outputs(first, np.array(sampled), np.array(accepted), now_s=0.0)
    resolved = second.batch.resolve_inputs(np.array(sampled), np.array([2], np.int32))
    assert resolved.positions.tolist() == [8]
    assert resolved.seqlens_k.tolist() == [9]
    assert resolved.output_indices.tolist() == [3]
    assert resolved.slot_mapping.tolist() == [int(s.cache.block_table[2]) * 4]
    assert resolved.token_ids.tolist() == sampled


def test_every_running_sequence_holds_one_draft_slot() -> None:
    scheduler, worker, sequences = prefilled(3, 4)
    assert sorted(s.draft.info_slot for s in sequences if s.draft.info_slot is not None) == [0, 1]
    scheduler.check_invariants()
    drain(scheduler, worker)
    assert scheduler._holdings.info_slots.num_taken == 0


def test_the_most_promising_drafts_are_verified_when_time_is_dear() -> None:
    """A token more costs as much as a sequence: only drafts that are likely enough pay."""
    scheduler, worker, (a, b) = prefilled(5, 6)
    outputs, _ = step(scheduler, worker)
    for count in (2, 8):
        scheduler._step_time.observe(2, count, forward_s=1.0 + 0.5 * count, sampler_s=0.0)
    assert scheduler._step_time.is_fitted
    scheduler.set_drafts(a, drafts_for(a, 3), confidences=[0.95, 0.9, 0.1])
    scheduler.set_drafts(b, drafts_for(b, 3), confidences=[0.2, 0.9, 0.9])
    outputs, _ = step(scheduler, worker)
    assert dict(zip(names(outputs.sequences), outputs.seqlens_q.tolist(), strict=True)) == {"a": 3, "b": 1}


def test_all_drafts_are_verified_when_they_cost_nothing() -> None:
    scheduler, worker, (a, b) = prefilled(5, 6)
    step(scheduler, worker)
    for count in (2, 8):
        scheduler._step_time.observe(2, count, forward_s=1.0, sampler_s=0.1)
    scheduler.set_drafts(a, drafts_for(a, 3), confidences=[0.9, 0.5, 0.1])
    scheduler.set_drafts(b, drafts_for(b, 3), confidences=[0.2, 0.2, 0.2])
    assert step(scheduler, worker)[0].seqlens_q.tolist() == [4, 4]


def test_acceptance_ends_at_the_first_rejection() -> None:
    prefixes = accepted_prefixes(np.array([3, 1, 4], np.int32), np.array([5, -1, 6, -1, 8]))
    assert list(prefixes) == [[5], [], [6]]
