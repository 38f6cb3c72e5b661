"""A prompt engine fetches an earlier turn's answer from the engine that decoded it, or computes it."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.handover_role import HandoverRole
from engine.pull_back import PullBackLimits
from tests.engine.pair import BLOCK_SIZE, CHUNK, EnginePair, engine_pair, greedy, run_normal, tiny_checkpoint
from tests.kv_transfer.clocks import JumpingClock

NUM_OUTPUT = 17
LIMITS = PullBackLimits(min_tokens=2 * BLOCK_SIZE, wait_s=20.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def tokens(count: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, 128) for _ in range(count)]


def chatting_pair(checkpoint: Path, clock: Callable[[], float] = time.monotonic) -> EnginePair:
    """`clock`: the prompt engine's."""
    return EnginePair(
        checkpoint,
        completion_blocks=128,
        prompt_cache=True,
        completion_cache=True,
        pull_back=LIMITS,
        prompt_clock=clock,
    )


def ask(pair: EnginePair, request_id: str, prompt: list[int], num_output: int = NUM_OUTPUT) -> list[int]:
    pair.add(request_id, prompt, greedy(num_output))
    pair.run_until(lambda: pair.completion.has_ended(request_id), "the answer")
    return pair.answer(request_id)


def second_turn(pair: EnginePair) -> tuple[list[int], int]:
    """The prompt of a second turn, and the tokens of it that only the completion engine has."""
    first = tokens(3 * CHUNK + 2, seed=0)
    history = first + ask(pair, "first", first)
    num_at_prompt_engine = len(first) // BLOCK_SIZE * BLOCK_SIZE
    num_at_completion_engine = (len(history) - 1) // BLOCK_SIZE * BLOCK_SIZE
    return history + tokens(6, seed=1), num_at_completion_engine - num_at_prompt_engine


def counter(role: HandoverRole, name: str) -> int:
    return int(role.transfer_counters()[name])


def test_the_answer_of_an_earlier_turn_is_fetched_and_the_next_answer_is_that_of_a_cold_run(
    checkpoint: Path,
) -> None:
    pair = chatting_pair(checkpoint)
    try:
        prompt, num_missing = second_turn(pair)
        answer = ask(pair, "second", prompt)
        assert {"cold": answer} == run_normal(checkpoint, {"cold": prompt}, greedy(NUM_OUTPUT))
        assert counter(pair.prompt.role, "pull_back_tokens") == num_missing
        assert pair.prompt.num_cached["second"] == len(prompt[:-7]) // BLOCK_SIZE * BLOCK_SIZE
        pair.run_until_drained()
    finally:
        pair.close()


def test_a_few_missing_tokens_are_computed_without_asking(checkpoint: Path) -> None:
    with engine_pair(
        checkpoint,
        completion_blocks=128,
        prompt_cache=True,
        completion_cache=True,
        pull_back=PullBackLimits(min_tokens=100, wait_s=20.0),
    ) as pair:
        prompt, _ = second_turn(pair)
        ask(pair, "second", prompt)
        assert counter(pair.prompt.role, "pull_back_requests") == 0


def test_an_engine_that_has_nothing_is_asked_once_and_the_prompt_is_computed(checkpoint: Path) -> None:
    with engine_pair(checkpoint, prompt_cache=True, completion_cache=False, pull_back=LIMITS) as pair:
        prompt = tokens(3 * CHUNK, seed=2)
        answer = ask(pair, "a", prompt)
        assert {"cold": answer} == run_normal(checkpoint, {"cold": prompt}, greedy(NUM_OUTPUT))
        assert counter(pair.prompt.role, "pull_back_failures_by_reason_withdrawn") == 1
        pair.run_until_drained()


@pytest.mark.parametrize("fault", ["error", "stall", "dead"])
def test_whatever_goes_wrong_the_prompt_is_computed(checkpoint: Path, fault: str) -> None:
    clock = JumpingClock(runs=True)
    pair = chatting_pair(checkpoint, clock)
    try:
        prompt, _ = second_turn(pair)
        if fault == "error":
            pair.fetching_transport.next_error = "injected"
        elif fault == "stall":
            pair.fetching_transport.stalled = True
        else:
            assert pair.lending is not None
            pair.lending.close()
        pair.add("second", prompt, greedy(NUM_OUTPUT))
        if fault == "stall":
            pair.run_until(lambda: pair.fetching_transport.num_reads == 1, "the read begins")
            clock.jump(LIMITS.wait_s)
        pair.run_until(lambda: pair.completion.has_ended("second"), "the answer")
        answer = pair.answer("second")
        assert counter(pair.prompt.role, "pull_back_tokens") == 0
        if fault == "stall":
            assert not pair.prompt.is_drained
        assert {"cold": answer} == run_normal(checkpoint, {"cold": prompt}, greedy(NUM_OUTPUT))
        pair.fetching_transport.stalled = False
        pair.run_until(lambda: pair.prompt.is_drained, "the blocks of the fetch go back")
    finally:
        pair.close()


@pytest.mark.parametrize("num_turns", range(0, 10, 3))
def test_aborted_while_fetching_pins_nothing(checkpoint: Path, num_turns: int) -> None:
    pair = chatting_pair(checkpoint)
    try:
        prompt, _ = second_turn(pair)
        pair.add("second", prompt, greedy(NUM_OUTPUT))
        for _ in range(num_turns):
            pair.prompt.turn()
            pair.completion.turn()
        pair.prompt.engine.abort("second")
        pair.completion.engine.abort("second")
        pair.run_until_drained()
        pair.run_until(
            lambda: "second" in pair.prompt.ended or "second" in pair.prompt.answers, "the end is told"
        )
        assert ask(pair, "again", prompt) == run_normal(checkpoint, {"a": prompt}, greedy(NUM_OUTPUT))["a"]
    finally:
        pair.close()


def test_lent_blocks_are_pinned_until_the_reader_lets_go(checkpoint: Path) -> None:
    """T8."""
    pair = chatting_pair(checkpoint)
    try:
        prompt, _ = second_turn(pair)
        pair.run_until_drained()
        pair.fetching_transport.stalled = True
        pair.add_prompt("second", prompt, greedy(NUM_OUTPUT))
        pair.run_until(lambda: pair.fetching_transport.num_reads == 1, "the read begins")
        assert not pair.completion.is_drained
        pair.fetching_transport.stalled = False
        pair.run_until(lambda: pair.completion.is_drained, "the loan is over")
    finally:
        pair.close()
