"""Prompts that begin like something computed before; 8 blocks of 4 tokens unless changed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_scheduler import AllocStatus, EngineType, Scheduler, SchedulerError, Sequence
from tests.shared_scheduler.builders import FakeWorker, config, drain, names, step
from tests.shared_scheduler.histories import IMAGE_PAD, IMAGE_START, chat_history, configs, examples, run_life
from wire.sampling import SamplingParams


def prompt(name: str, *token_ids: int, max_tokens: int = 1, salt: str = "") -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Sequence(name, token_ids, sampling, block_size=4, cache_salt=salt)


class Engine:
    """A scheduler with a cache and its worker."""

    def __init__(self, **changes: object) -> None:
        self.config = config(prefix_cache=True, **changes)
        self.scheduler = Scheduler(self.config)
        self.worker = FakeWorker(self.config)

    def serve(self, *sequences: Sequence) -> None:
        for s in sequences:
            self.scheduler.add_sequence(s, 0.0)
        drain(self.scheduler, self.worker)

    def arrive(self, s: Sequence) -> list[int]:
        """COMPLETION: take a sequence in; returns its block table."""
        assert self.scheduler.reserve_remote(s, 0.0) is AllocStatus.OK
        table = s.cache.block_table.tolist()
        self.worker.receive(s)
        self.scheduler.admit_arrived(s, 7)
        self.scheduler.check_invariants()
        return table


TWELVE = tuple(range(10, 22))


def test_a_prompt_starts_behind_what_is_cached_of_it() -> None:
    engine = Engine()
    engine.serve(prompt("first", *TWELVE))
    second = prompt("second", *TWELVE, 30)
    engine.scheduler.add_sequence(second, 0.0)
    outputs, _ = step(engine.scheduler, engine.worker)
    assert (outputs.seqlens_q.tolist(), outputs.num_cached_tokens, second.cache.hit_tokens) == ([1], 12, 12)
    assert outputs.batch is not None
    assert outputs.batch.positions.tolist() == [12]
    assert outputs.batch.block_tables.tolist() == [[1, 2, 3, 4]]


def test_a_prompts_last_token_is_always_computed() -> None:
    engine = Engine()
    engine.serve(prompt("first", *TWELVE))
    engine.serve(second := prompt("second", *TWELVE))
    assert second.cache.hit_tokens == 8


def test_only_the_missing_blocks_must_be_free() -> None:
    engine = Engine()
    engine.serve(prompt("first", *TWELVE))
    held = [prompt("holder", *range(40, 58), max_tokens=9), prompt("second", *TWELVE, 1)]
    for s in held:
        engine.scheduler.add_sequence(s, 0.0)
    outputs, _ = step(engine.scheduler, engine.worker)
    assert names(outputs.sequences) == ["holder"], "one block is free, and two of the cached ones had to go"
    drain(engine.scheduler, engine.worker)


def test_a_chunk_can_be_reused_before_its_prompt_is_complete() -> None:
    engine = Engine(engine_type=EngineType.PROMPT, max_num_batched_tokens=8)
    first, second = prompt("first", *TWELVE), prompt("second", *TWELVE)
    engine.scheduler.add_sequence(first, 0.0)
    step(engine.scheduler, engine.worker)
    engine.scheduler.add_sequence(second, 0.0)
    step(engine.scheduler, engine.worker)
    assert second.cache.hit_tokens == 8
    assert second.cache.block_table.tolist()[:2] == first.cache.block_table.tolist()[:2]


def test_two_that_compute_the_same_end_up_with_the_same_blocks() -> None:
    engine = Engine()
    first, second = prompt("first", *TWELVE, max_tokens=9), prompt("second", *TWELVE, max_tokens=9)
    for s in (first, second):
        engine.scheduler.add_sequence(s, 0.0)
    step(engine.scheduler, engine.worker)
    assert first.cache.block_table.tolist() == second.cache.block_table.tolist() == [1, 2, 3]
    assert engine.scheduler.num_free_blocks == 5


def test_an_answer_is_reused_by_the_next_turn() -> None:
    engine = Engine()
    engine.serve(first := prompt("first", *TWELVE[:6], max_tokens=7))
    assert first.num_tokens == 13
    engine.serve(second := prompt("second", *first.token_ids, 3))
    assert second.cache.hit_tokens == 12, "the last token's KV was never computed"


def test_an_aborted_prompt_leaves_what_was_computed() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.scheduler.add_sequence(prompt("first", *TWELVE), 0.0)
    step(engine.scheduler, engine.worker)
    engine.scheduler.abort("first")
    drain(engine.scheduler, engine.worker)
    engine.serve(second := prompt("second", *TWELVE))
    assert second.cache.hit_tokens == 8


def test_a_step_in_flight_leaves_nothing_before_its_results_are_in() -> None:
    engine = Engine()
    engine.scheduler.add_sequence(prompt("first", *TWELVE), 0.0)
    outputs = engine.scheduler.schedule()
    engine.scheduler.abort("first")
    assert engine.scheduler.lend(TWELVE) is None
    engine.scheduler.process_outputs(outputs, np.array([7]), now_s=0.0)
    drain(engine.scheduler, engine.worker)
    assert engine.scheduler.lend(TWELVE) is None, "the output of an aborted sequence is void"


def test_a_recomputed_sequence_finds_its_own_blocks_and_reports_none_of_them() -> None:
    engine = Engine(num_blocks=10, stop_preempted_request=False)
    older, newer = prompt("older", *TWELVE[:8], max_tokens=12), prompt("newer", *TWELVE[4:], max_tokens=12)
    for s in (older, newer):
        engine.scheduler.add_sequence(s, 0.0)
    starts = []
    while engine.scheduler.has_work():
        outputs, _ = step(engine.scheduler, engine.worker)
        if outputs.prompt_run and outputs.batch is not None:
            starts.append((outputs.batch.seqlens_k - outputs.seqlens_q).tolist())
    assert len(starts) > 1
    assert starts[0] == [0, 0]
    assert all(max(start) > 0 for start in starts[1:])
    assert older.cache.hit_tokens == newer.cache.hit_tokens == 0
    assert engine.scheduler.cache_stats().num_query_tokens == 16


def test_salts_part_what_is_otherwise_equal() -> None:
    engine = Engine()
    engine.serve(prompt("first", *TWELVE, salt="mine"))
    engine.serve(
        second := prompt("second", *TWELVE, salt="yours"), third := prompt("third", *TWELVE, 1, salt="mine")
    )
    assert (second.cache.hit_tokens, third.cache.hit_tokens) == (0, 12)


def test_a_prompt_that_differs_in_its_first_token_shares_nothing() -> None:
    engine = Engine()
    engine.serve(prompt("first", *TWELVE))
    engine.serve(second := prompt("second", 9, *TWELVE[1:]))
    assert second.cache.hit_tokens == 0


def test_nothing_is_reused_from_an_image_on() -> None:
    """Its pads are the same for all images."""
    engine = Engine(image_pad_token_id=IMAGE_PAD, image_start_token_id=IMAGE_START, num_blocks=20)
    tokens = (1, 2, 3, 4, 5, 6, 7, IMAGE_START, *[IMAGE_PAD] * 4, 8, 9, 10, 11)
    engine.serve(prompt("first", *tokens))
    engine.serve(second := prompt("second", *tokens))
    assert second.cache.hit_tokens == 4


def test_without_the_option_nothing_is_kept() -> None:
    scheduler = Scheduler(config())
    worker = FakeWorker(scheduler.config)
    for name in ("first", "second"):
        scheduler.add_sequence(s := prompt(name, *TWELVE), 0.0)
        drain(scheduler, worker)
    assert (s.cache.hit_tokens, scheduler.cache, scheduler.lend(TWELVE)) == (0, None, None)


def test_hits_are_counted_in_tokens_once_per_sequence() -> None:
    engine = Engine()
    engine.serve(prompt("first", *TWELVE), prompt("second", *TWELVE, 1))
    engine.serve(prompt("third", *TWELVE, 1))
    stats = engine.scheduler.cache_stats()
    assert (stats.num_query_tokens, stats.num_hit_tokens, stats.num_cached_blocks) == (38, 12, 3)


# ----- forks


@pytest.mark.parametrize("is_parent_alive", [True, False])
def test_a_fork_at_a_block_boundary_writes_into_its_own_copy_of_a_cached_block(is_parent_alive: bool) -> None:
    engine = Engine(num_blocks=20)
    parent = prompt("parent", *TWELVE, max_tokens=9)
    engine.scheduler.add_sequence(parent, 0.0)
    step(engine.scheduler, engine.worker)
    child = engine.scheduler.fork(parent, "child", output_token_ids=[], now_s=0.0)
    if not is_parent_alive:
        engine.scheduler.abort("parent")
    outputs, _ = step(engine.scheduler, engine.worker)
    assert len(outputs.clone_blocks) == 1
    drain(engine.scheduler, engine.worker)
    assert child.num_output_tokens == 9


# ----- states


def test_a_model_with_states_starts_from_a_copy_of_a_kept_state() -> None:
    engine = Engine(num_state_slots=6)
    engine.serve(prompt("first", *TWELVE, 1, 2))
    second = prompt("second", *TWELVE, 30)
    engine.scheduler.add_sequence(second, 0.0)
    outputs, _ = step(engine.scheduler, engine.worker)
    assert (outputs.seqlens_q.tolist(), second.cache.hit_tokens) == ([1], 12)
    assert outputs.clone_states == [(2, 3)]
    assert outputs.zero_states == []


def test_without_a_kept_state_cached_blocks_do_not_count() -> None:
    engine = Engine(num_state_slots=6)
    engine.serve(prompt("first", *TWELVE, 1, 2))
    engine.serve(second := prompt("second", *TWELVE[:9]))
    assert second.cache.hit_tokens == 0, "the state is kept at 12 tokens, not at 8"


def test_states_are_kept_at_the_last_full_block_and_at_regular_distances() -> None:
    engine = Engine(num_state_slots=6, state_snapshot_blocks=2, num_blocks=20)
    engine.scheduler.add_sequence(prompt("first", *range(40, 63)), 0.0)
    ends = []
    while engine.scheduler.has_work():
        outputs, _ = step(engine.scheduler, engine.worker)
        if outputs.batch is not None and outputs.prompt_run:
            ends += outputs.batch.seqlens_k.tolist()
    assert ends == [8, 16, 20, 23]


def test_kept_states_count_as_free_and_go_when_slots_are_needed() -> None:
    engine = Engine(num_state_slots=3, num_blocks=20)
    engine.serve(prompt("first", *TWELVE, 1))
    assert engine.scheduler.num_free_slots == 2
    engine.serve(prompt("second", *range(40, 53)), prompt("third", *range(60, 73)))
    engine.serve(fourth := prompt("fourth", *TWELVE, 1))
    assert fourth.cache.hit_tokens == 0


def test_a_kept_state_goes_with_its_blocks() -> None:
    engine = Engine(num_state_slots=6)
    engine.serve(prompt("first", *TWELVE, 1))
    engine.serve(prompt("other", *range(40, 70)))
    engine.scheduler.check_invariants()
    engine.serve(second := prompt("second", *TWELVE, 1))
    assert second.cache.hit_tokens == 0


# ----- COMPLETION


def test_an_arrival_reuses_full_blocks_and_gets_the_others_empty() -> None:
    engine = Engine(engine_type=EngineType.COMPLETION, partial_pulls=True, num_blocks=20)
    engine.arrive(prompt("first", *TWELVE, max_tokens=2))
    second = prompt("second", *TWELVE, max_tokens=2)
    assert engine.arrive(second) == [1, 2, 3]
    assert second.cache.hit_tokens == 12
    third = prompt("third", *TWELVE, 1, 2, max_tokens=2)
    table = engine.arrive(third)
    assert table[:3] == [1, 2, 3]
    assert (len(table), third.cache.hit_tokens) == (4, 12)
    drain(engine.scheduler, engine.worker)


def test_an_arrival_of_a_whole_transfer_moves_over_to_what_was_cached() -> None:
    engine = Engine(engine_type=EngineType.COMPLETION, num_blocks=20)
    engine.arrive(prompt("first", *TWELVE, max_tokens=2))
    second = prompt("second", *TWELVE, max_tokens=2)
    assert engine.arrive(second) == [4, 5, 6]
    assert (second.cache.block_table.tolist(), second.cache.hit_tokens) == ([1, 2, 3], 0)


def test_a_dropped_arrival_leaves_nothing_it_has_not_received() -> None:
    engine = Engine(engine_type=EngineType.COMPLETION, partial_pulls=True)
    engine.arrive(prompt("first", *TWELVE[:4], max_tokens=2))
    second = prompt("second", *TWELVE)
    assert engine.scheduler.reserve_remote(second, 0.0) is AllocStatus.OK
    engine.scheduler.drop_remote(second)
    engine.scheduler.check_invariants()
    loan = engine.scheduler.lend(TWELVE)
    assert loan is not None
    assert loan.num_tokens == 4


def test_an_arrival_counts_cached_blocks_as_room_it_does_not_need() -> None:
    engine = Engine(engine_type=EngineType.COMPLETION, partial_pulls=True, remote_growth_tokens=0)
    engine.arrive(prompt("first", *TWELVE, *TWELVE[:8], max_tokens=9))
    assert engine.scheduler.num_free_blocks == 3
    assert engine.scheduler.reserve_remote(prompt("strange", *range(16)), 0.0) is AllocStatus.LATER
    assert engine.scheduler.reserve_remote(prompt("known", *TWELVE, *range(8)), 0.0) is AllocStatus.OK


# ----- loans and imports


def test_a_lent_prefix_stays_until_it_is_given_back() -> None:
    engine = Engine()
    engine.serve(prompt("first", *TWELVE))
    loan = engine.scheduler.lend([*TWELVE, 99], first_block=1)
    assert loan is not None
    assert (loan.block_ids.tolist(), loan.num_tokens) == ([2, 3], 12)
    assert engine.scheduler.num_free_blocks == 5
    engine.serve(prompt("other", *range(40, 58)))
    assert engine.worker.holds(loan.block_ids.tolist(), TWELVE[4:], "")
    engine.scheduler.give_back(loan)
    assert engine.scheduler.num_free_blocks == 8
    with pytest.raises(SchedulerError, match="a loan is ended that is not open"):
        engine.scheduler.give_back(loan)


def test_nothing_is_lent_of_what_is_not_cached() -> None:
    engine = Engine()
    engine.serve(prompt("first", *TWELVE))
    assert engine.scheduler.lend(TWELVE, first_block=3) is None
    assert engine.scheduler.lend(TWELVE, "salt") is None


def test_imported_blocks_are_found_once_they_are_committed() -> None:
    engine = Engine()
    engine.serve(prompt("first", *TWELVE[:4]))
    wanted = engine.scheduler.reserve_import(TWELVE, "", 1, 2)
    assert wanted is not None
    engine.worker.fill(wanted.block_ids.tolist(), TWELVE[4:], "")
    assert engine.scheduler.lend(TWELVE, first_block=1) is None
    engine.scheduler.commit_import(wanted)
    engine.scheduler.check_invariants()
    engine.serve(second := prompt("second", *TWELVE, 1))
    assert second.cache.hit_tokens == 12


def test_an_import_that_came_too_late_gives_its_blocks_back() -> None:
    engine = Engine()
    wanted = engine.scheduler.reserve_import(TWELVE, "", 0, 2)
    assert wanted is not None
    engine.serve(prompt("first", *TWELVE))
    engine.scheduler.commit_import(wanted)
    engine.scheduler.check_invariants()
    assert (engine.scheduler.num_free_blocks, engine.scheduler.cache_stats().num_cached_blocks) == (8, 3)


def test_an_import_needs_room_and_the_blocks_before_it() -> None:
    engine = Engine()
    assert engine.scheduler.reserve_import(TWELVE, "", 1, 2) is None
    assert engine.scheduler.reserve_import(range(40), "", 0, 9) is None
    with pytest.raises(SchedulerError, match="only 3 are full"):
        engine.scheduler.reserve_import(TWELVE, "", 2, 2)


def test_a_dropped_import_leaves_nothing() -> None:
    engine = Engine()
    wanted = engine.scheduler.reserve_import(TWELVE, "", 0, 3)
    assert wanted is not None
    engine.scheduler.drop_import(wanted)
    assert (engine.scheduler.num_free_blocks, engine.scheduler.lend(TWELVE)) == (8, None)


# ----- random conversations


@pytest.mark.parametrize("engine_type", EngineType)
@examples(40)
@given(data=st.data(), seed=st.integers(0, 2**32), overlapped=st.booleans())
def test_conversations_that_fork_end_and_come_back_keep_every_invariant(
    engine_type: EngineType, data: st.DataObject, seed: int, overlapped: bool
) -> None:
    """`test_properties` says which."""
    roomy = {"prefix_cache": True, "cp_size": 1, "max_model_len": 40, "max_num_batched_tokens": 48}
    num_blocks = data.draw(st.integers(14, 40))
    run_life(data.draw(configs(engine_type, num_blocks=num_blocks, **roomy)), chat_history(seed), overlapped)


def test_an_arrival_without_the_blocks_before_its_window_is_not_kept() -> None:
    engine = Engine(engine_type=EngineType.COMPLETION, sliding_window=5, partial_pulls=True, num_blocks=20)
    first = prompt("first", *TWELVE, max_tokens=2)
    engine.arrive(first)
    assert first.cache.swa_valid_start == 8
    drain(engine.scheduler, engine.worker)
    assert engine.scheduler.num_free_blocks == engine.scheduler.num_usable_blocks
    engine.arrive(second := prompt("second", *TWELVE, max_tokens=2))
    assert second.cache.hit_tokens == 0
