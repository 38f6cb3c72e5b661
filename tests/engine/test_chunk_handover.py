"""A prompt moves while it is computed: the same answers, sooner; nothing stays pinned, nobody is starved."""

import random
from pathlib import Path

import pytest

from engine.completion_role import ArrivalLimits, CompletionHandover
from engine.ipc import RequestOutput
from tests.engine.pair import (
    CHUNK,
    EnginePair,
    engine_pair,
    greedy,
    run_normal,
    tiny_checkpoint,
)

NUM_CHUNKS = 5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, 128) for _ in range(num_tokens)]


def prompts_of(count: int, num_tokens: int) -> dict[str, list[int]]:
    return {str(seed): prompt_of(num_tokens, seed) for seed in range(count)}


def ended(pair: EnginePair, *request_ids: str) -> bool:
    return all(pair.completion.has_ended(request_id) for request_id in request_ids)


def failure(pair: EnginePair, request_id: str) -> tuple[int, str | None]:
    end = pair.completion.answers[request_id].end
    assert isinstance(end, RequestOutput)
    assert end.failure is not None
    return end.failure.status, end.failure.error.code


def read_chunks(pair: EnginePair, count: int) -> None:
    """Until `count` chunks have been asked for; the prompt engine computes no further than needed."""
    for num_chunks in range(1, count + 1):
        if pair.prompt.engine.has_work:
            pair.prompt.turn()
        pair.run_completion_until(lambda num=num_chunks: pair.transport.num_reads >= num, "a chunk is read")


def test_chunks_are_read_while_the_prompt_is_computed(checkpoint: Path) -> None:
    prompt = prompt_of(NUM_CHUNKS * CHUNK + 3)
    with engine_pair(checkpoint) as pair:
        pair.add("a", prompt, greedy(6))
        read_chunks(pair, NUM_CHUNKS)
        assert "a" not in pair.prompt.answers
        pair.run_until(lambda: ended(pair, "a"), "the answer")
        assert {"a": pair.answer("a")} == run_normal(checkpoint, {"a": prompt}, greedy(6))
        assert pair.transport.num_reads == NUM_CHUNKS + 1
        pair.run_until_drained()


def test_without_chunk_handover_a_prompt_is_one_read(checkpoint: Path) -> None:
    prompt = prompt_of(NUM_CHUNKS * CHUNK)
    with engine_pair(checkpoint, chunk_handover=False) as pair:
        pair.add("a", prompt, greedy(6))
        pair.run_until(lambda: ended(pair, "a"), "the answer")
        assert pair.transport.num_reads == 1
        assert {"a": pair.answer("a")} == run_normal(checkpoint, {"a": prompt}, greedy(6))


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_a_first_token_that_ends_the_request_withdraws_what_is_half_read(
    checkpoint: Path, num_chunks: int
) -> None:
    with engine_pair(checkpoint) as pair:
        pair.add("a", prompt_of(NUM_CHUNKS * CHUNK), greedy(1))
        read_chunks(pair, num_chunks)
        pair.run_until(lambda: ended(pair, "a"), "the completion leg ends")
        end = pair.completion.answers["a"].end
        assert end is not None
        assert end.finish_reason == "handover_withdrawn"
        assert pair.completion.answers["a"].token_ids == []
        pair.run_until_drained()


@pytest.mark.parametrize("leg", ["prompt", "completion"])
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_aborted_in_the_middle_gives_no_token_and_returns_blocks_on_both_sides(
    checkpoint: Path, leg: str, num_chunks: int
) -> None:
    """T2."""
    with engine_pair(checkpoint) as pair:
        pair.add("a", prompt_of(NUM_CHUNKS * CHUNK), greedy(4))
        read_chunks(pair, num_chunks)
        engine = pair.prompt if leg == "prompt" else pair.completion
        engine.engine.abort("a")
        pair.run_until_drained()
        assert "a" not in pair.completion.answers or pair.completion.answers["a"].token_ids == []


def test_blocks_of_a_half_read_prompt_are_not_given_to_anyone_while_a_read_is_stuck(checkpoint: Path) -> None:
    """T15."""
    with engine_pair(checkpoint) as pair:
        pair.transport.stalled = True
        pair.add("a", prompt_of(NUM_CHUNKS * CHUNK), greedy(4))
        read_chunks(pair, 2)
        pair.completion.engine.abort("a")
        for _ in range(20):
            pair.prompt.turn()
            pair.completion.turn()
        assert not pair.completion.is_drained
        pair.transport.stalled = False
        pair.run_until_drained()


def test_arrivals_take_no_more_than_their_share_of_the_pool(checkpoint: Path) -> None:
    """E3, E10: the rest belongs to what runs."""
    prompts = prompts_of(6, 3 * CHUNK)
    limits = ArrivalLimits(wait_s=20.0, room_wait_s=20.0, share=0.25)
    with engine_pair(checkpoint, prompt_blocks=128, completion_blocks=61, limits=limits) as pair:
        pair.transport.stalled = True
        for request_id, prompt in prompts.items():
            pair.add(request_id, prompt, greedy(5))
        pair.run_until(lambda: prompts.keys() <= pair.prompt.answers.keys(), "all first tokens")
        pair.run_completion_until(lambda: num_arriving(pair) == 12, "as many as the share takes come")
        for _ in range(10):
            pair.completion.turn()
        assert num_arriving(pair) == 12
        pair.transport.stalled = False
        pair.run_until(lambda: ended(pair, *prompts), "all answers")
        assert {r: pair.answer(r) for r in prompts} == run_normal(checkpoint, prompts, greedy(5))


def num_arriving(pair: EnginePair) -> int:
    assert isinstance(pair.completion.role, CompletionHandover)
    return pair.completion.role.num_arriving_blocks


def test_a_sequence_larger_than_the_share_comes_alone(checkpoint: Path) -> None:
    limits = ArrivalLimits(wait_s=20.0, room_wait_s=20.0, share=0.1)
    prompts = prompts_of(2, 3 * CHUNK)
    with engine_pair(checkpoint, limits=limits) as pair:
        for request_id, prompt in prompts.items():
            pair.add(request_id, prompt, greedy(5))
        pair.run_until(lambda: ended(pair, *prompts), "all answers")
        assert {r: pair.answer(r) for r in prompts} == run_normal(checkpoint, prompts, greedy(5))


def test_a_handover_that_finds_no_room_is_left_to_another_completion_leg(checkpoint: Path) -> None:
    limits = ArrivalLimits(wait_s=20.0, room_wait_s=0.05, share=1.0)
    prompts = prompts_of(2, 4 * CHUNK)
    with engine_pair(checkpoint, completion_blocks=14, limits=limits) as pair:
        pair.transport.stalled = True
        for request_id, prompt in prompts.items():
            pair.add(request_id, prompt, greedy(5))
        pair.run_until(lambda: ended(pair, "1"), "the second one is refused")
        assert failure(pair, "1") == (503, "handover_no_room")
        assert pair.completion.answers["1"].token_ids == []
        pair.transport.stalled = False
        pair.run_until(lambda: ended(pair, "0"), "the first one's answer")
        pair.add_completion("again", prompts["1"], greedy(5), handover_id="handover-1")
        pair.run_until(lambda: ended(pair, "again"), "the second one's answer")
        answer = pair.prompt.answers["1"].token_ids + pair.completion.answers["again"].token_ids
        assert answer == run_normal(checkpoint, prompts, greedy(5))["1"]
        pair.run_until_drained()
