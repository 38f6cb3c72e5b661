import pytest

from shared_scheduler import EngineType, RequestError, Scheduler, SequenceStatus
from tests.shared_scheduler.builders import FakeWorker, config, drain, names, run_ids, sequence


def prompt_engine(**changes: object) -> Scheduler:
    return Scheduler(config(engine_type=EngineType.PROMPT, **changes))


def add(scheduler: Scheduler, *lengths: int, **changes: object) -> None:
    for i, length in enumerate(lengths):
        scheduler.add_sequence(sequence("abcdefgh"[i], length, **changes), 0.0)  # type: ignore[arg-type]


def test_prompts_are_taken_in_order_of_arrival() -> None:
    scheduler = prompt_engine()
    add(scheduler, 5, 3, 4)
    outputs = scheduler.schedule()
    assert names(outputs.sequences) == ["a", "b", "c"]
    assert outputs.seqlens_q.tolist() == [5, 3, 4]
    assert [s.cache.block_table.tolist() for s in outputs.sequences] == [[1, 2], [3], [4]]


def test_prompt_engine_fills_the_step_behind_a_cut() -> None:
    scheduler = prompt_engine(max_num_batched_tokens=10)
    add(scheduler, 9, 5, chunk_checkpoints=(4,))
    outputs = scheduler.schedule()
    assert names(outputs.sequences) == ["a", "b"]
    assert outputs.seqlens_q.tolist() == [4, 4]


def test_cut_prompts_return_to_the_head_in_their_order() -> None:
    scheduler = prompt_engine(max_num_batched_tokens=16)
    add(scheduler, 9, 8, 3, chunk_checkpoints=(4,))
    assert run_ids(scheduler)[0].seqlens_q.tolist() == [4, 4, 3]
    assert names(scheduler.schedule().sequences) == ["a", "b"]


def test_normal_engine_stops_after_one_cut_prompt() -> None:
    scheduler = Scheduler(config(max_num_batched_tokens=10))
    add(scheduler, 9, 5, chunk_checkpoints=(4,))
    assert names(scheduler.schedule().sequences) == ["a"]


def test_prompt_engine_answers_an_empty_prompt_step_when_nothing_fits() -> None:
    scheduler = prompt_engine()
    outputs = scheduler.schedule()
    assert outputs.prompt_run
    assert outputs.is_empty
    assert scheduler.process_outputs(outputs, outputs.rows, now_s=0.0).token_ids.size == 0


def test_middle_chunk_takes_every_block_of_the_prompt_and_waits() -> None:
    scheduler = prompt_engine(max_num_batched_tokens=8)
    add(scheduler, 20)
    outputs, results = run_ids(scheduler)
    (s,) = outputs.sequences
    assert s.cache.block_table.tolist() == [1, 2, 3, 4, 5]
    assert (s.status, s.schedule.chunked_rest_len) == (SequenceStatus.WAITING, 12)
    assert results.num_appended.tolist() == [0]


def test_last_chunk_runs_and_is_held_for_its_hand_over() -> None:
    scheduler = prompt_engine(max_num_batched_tokens=8)
    add(scheduler, 12)
    run_ids(scheduler)
    outputs, results = run_ids(scheduler)
    assert outputs.seqlens_q.tolist() == [4]
    assert names(results.prompts_done) == ["a"]
    assert results.token_ids.tolist() == [7]
    assert (scheduler.num_held, scheduler.num_free_blocks) == (1, 5)
    scheduler.release_handover(results.prompts_done[0])
    assert scheduler.num_free_blocks == 8


def test_a_prompt_that_ends_with_its_first_token_is_not_held() -> None:
    scheduler = prompt_engine()
    add(scheduler, 5, max_tokens=1)
    _, results = run_ids(scheduler)
    assert names(results.finished) == ["a"]
    assert results.prompts_done == ()
    assert scheduler.num_free_blocks == 8


def test_an_abort_of_a_held_sequence_only_marks_it() -> None:
    scheduler = prompt_engine()
    add(scheduler, 5)
    _, results = run_ids(scheduler)
    scheduler.abort("a")
    run_ids(scheduler)
    assert results.prompts_done[0].finish_reason == "abort"
    assert scheduler.num_free_blocks == 6
    scheduler.release_handover(results.prompts_done[0])
    assert scheduler.num_free_blocks == 8


def test_waiting_prompts_are_swept_anywhere_in_the_queue() -> None:
    scheduler = prompt_engine(max_num_seqs=1)
    add(scheduler, 5, 5, 5)
    scheduler.abort("c")
    outputs, _ = run_ids(scheduler)
    assert names(outputs.finished) == ["c"]
    assert names(outputs.sequences) == ["a"]


def test_an_unschedulable_head_blocks_those_behind_it() -> None:
    scheduler = prompt_engine()
    scheduler.add_sequence(sequence("image", 5, schedulable=False), 0.0)
    add(scheduler, 5)
    assert scheduler.schedule().is_empty
    assert not scheduler.has_work()
    scheduler.set_schedulable("image")
    assert names(scheduler.schedule().sequences) == ["image", "a"]


def test_a_failed_image_leaves_the_queue_with_its_reason() -> None:
    scheduler = prompt_engine()
    scheduler.add_sequence(sequence("image", 5, schedulable=False), 0.0)
    scheduler.fail("image", SequenceStatus.FINISHED_VE_FAILED)
    outputs = scheduler.schedule()
    assert [s.finish_reason for s in outputs.finished] == ["vision_encoder_failed"]


@pytest.mark.parametrize(
    ("length", "changes"),
    [
        (33, {}),
        (30, {"num_blocks": 7}),
        (20, {"prefill_max_sum_seqlen_k": 19}),
    ],
    ids=["longer than the model", "larger than the pool", "more keys than a step may have"],
)
def test_a_hopeless_prompt_ends_and_leaves_no_trace(length: int, changes: dict[str, object]) -> None:
    scheduler = prompt_engine(**changes)
    add(scheduler, length, 3)
    outputs = scheduler.schedule()
    assert [(s.request_id, s.finish_reason) for s in outputs.ignored] == [("a", "prompt_length_exceeded")]
    assert names(outputs.sequences) == ["b"]
    assert scheduler.get("a") is None


def test_an_image_larger_than_the_budget_ends_instead_of_waiting_for_ever() -> None:
    scheduler = prompt_engine(max_num_batched_tokens=6, image_pad_token_id=13, image_start_token_id=12)
    s = sequence("a", 1)
    scheduler.add_sequence(type(s)("image", [12, *[13] * 8, 5], s.sampling, block_size=4), 0.0)
    assert names(scheduler.schedule().ignored) == ["image"]


def test_blocks_and_slot_are_taken_together_or_not_at_all() -> None:
    scheduler = prompt_engine(num_state_slots=2)
    add(scheduler, 5, 5)
    outputs, _ = run_ids(scheduler)
    assert names(outputs.sequences) == ["a"]
    assert outputs.zero_states == [1]
    assert (scheduler.num_free_blocks, scheduler.num_free_slots) == (6, 0)


def test_the_sum_of_keys_bounds_a_step() -> None:
    scheduler = prompt_engine(prefill_max_sum_seqlen_k=9)
    add(scheduler, 5, 4, 1)
    assert names(scheduler.schedule().sequences) == ["a", "b"]


def test_every_sequence_of_a_prompt_step_counts_against_the_cap() -> None:
    scheduler = prompt_engine(max_num_seqs=2, chunked_prefill=True)
    add(scheduler, 6, 6, 6, chunk_checkpoints=(3,))
    assert names(scheduler.schedule().sequences) == ["a", "b"]


def test_context_parallel_steps_count_aligned_lengths() -> None:
    scheduler = prompt_engine(cp_size=2, max_num_batched_tokens=12)
    add(scheduler, 5, 3, 7)
    outputs = scheduler.schedule()
    assert outputs.seqlens_q.tolist() == [5, 3]
    assert outputs.num_batched_tokens == 8


def test_a_head_that_waits_for_blocks_lets_half_computed_prompts_finish_first() -> None:
    """Preempted `a` is put before `b`, which holds what `a` needs: without this nothing ever moved again."""
    scheduler = Scheduler(
        config(
            num_blocks=5, max_num_batched_tokens=8, stop_preempted_request=False, prefill_attempt_interval=2
        )
    )
    worker = FakeWorker(scheduler.config)
    scheduler.add_sequence(sequence("a", 4, max_tokens=9, ignore_eos=True), 0.0)
    scheduler.add_sequence(sequence("b", 12, max_tokens=4, ignore_eos=True), 0.0)
    assert sorted(names(drain(scheduler, worker))) == ["a", "b"]


def test_a_request_id_in_use_is_refused() -> None:
    scheduler = prompt_engine()
    add(scheduler, 5)
    with pytest.raises(RequestError, match="'a' is already in use"):
        add(scheduler, 5)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="empty prompt"):
        sequence("a", 0)


def test_checkpoints_out_of_order_are_refused() -> None:
    with pytest.raises(RequestError, match=r"\[5, 3\]"):
        sequence("a", 9, chunk_checkpoints=(5, 3))


def test_a_sequence_with_another_block_size_is_refused() -> None:
    with pytest.raises(RequestError, match="blocks of 8 tokens, the pool has block_size=4"):
        prompt_engine().add_sequence(sequence("a", 5, block_size=8), 0.0)
