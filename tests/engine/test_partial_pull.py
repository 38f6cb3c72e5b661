"""A completion engine pulls what its own cache lacks, whatever the prompt engine had cached itself."""

import random
from pathlib import Path

import pytest

from engine.handover_role import HandoverRole
from tests.engine.pair import BLOCK_SIZE, CHUNK, EnginePair, engine_pair, greedy, run_normal, tiny_checkpoint
from wire.sampling import SamplingParams

NUM_OUTPUT = 7


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def tokens(count: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, 128) for _ in range(count)]


def ask(pair: EnginePair, request_id: str, prompt: list[int], sampling: SamplingParams) -> list[int]:
    pair.add(request_id, prompt, sampling)
    pair.run_until(lambda: pair.completion.has_ended(request_id), "the answer")
    return pair.answer(request_id)


def counter(role: HandoverRole, name: str) -> int:
    return int(role.transfer_counters()[name])


@pytest.mark.parametrize("prompt_cache", [False, True])
def test_turn_n_of_a_chat_moves_only_new_blocks(checkpoint: Path, prompt_cache: bool) -> None:
    """P9. What D has of a turn is its prompt and its answer, but for the last token, which it never read."""
    history, num_known, block_bytes = tokens(3 * CHUNK + 1, seed=0), 0, 0
    with engine_pair(
        checkpoint, completion_blocks=128, prompt_cache=prompt_cache, completion_cache=True
    ) as pair:
        for turn in range(4):
            role = pair.completion.role
            names = ("blocks_read", "bytes_read", "blocks_skipped")
            num_read, num_bytes, num_skipped = (counter(role, name) for name in names)
            answer = ask(pair, str(turn), history, greedy(NUM_OUTPUT))
            assert {"cold": answer} == run_normal(checkpoint, {"cold": history}, greedy(NUM_OUTPUT))
            num_blocks, num_cached = -(-len(history) // BLOCK_SIZE), num_known // BLOCK_SIZE
            num_new = num_blocks - num_cached
            assert counter(role, "blocks_read") - num_read == num_new
            assert counter(role, "blocks_skipped") - num_skipped == num_cached
            block_bytes = block_bytes or counter(role, "bytes_read") // num_new
            assert counter(role, "bytes_read") - num_bytes == num_new * block_bytes
            num_known = len(history) + NUM_OUTPUT - 1
            history = history + answer + tokens(5, seed=turn + 1)
        pair.run_until_drained()


@pytest.mark.parametrize("loss", ["wrong bytes", "a failed read", "left half way"])
def test_a_pull_that_was_lost_leaves_nothing_in_the_cache(checkpoint: Path, loss: str) -> None:
    """The same prompt asks for all of its blocks once more, and finds none of what was read in vain."""
    prompt = tokens(3 * CHUNK + 1, seed=5)
    with engine_pair(checkpoint, prompt_cache=True, completion_cache=True, verify_kv=True) as pair:
        pair.transport.corrupt = set(range(64)) if loss == "wrong bytes" else set()
        pair.transport.next_error = "injected" if loss == "a failed read" else None
        pair.add("lost", prompt, greedy(NUM_OUTPUT))
        if loss == "left half way":
            pair.transport.stalled = True
            pair.run_until(lambda: pair.transport.num_reads > 0, "a part is read")
            pair.completion.engine.abort("lost")
            pair.transport.stalled = False
        else:
            pair.run_until(lambda: pair.completion.has_ended("lost"), "the failure")
            assert pair.completion.answers["lost"].token_ids == []
        pair.run_until_drained()
        pair.transport.corrupt = set()
        answer = ask(pair, "again", prompt, greedy(NUM_OUTPUT))
        assert {"cold": answer} == run_normal(checkpoint, {"cold": prompt}, greedy(NUM_OUTPUT))
        assert counter(pair.completion.role, "blocks_skipped") == 0
        pair.run_until_drained()


def test_a_prompt_that_is_all_here_moves_nothing_and_is_released(checkpoint: Path) -> None:
    prompt = tokens(2 * CHUNK, seed=1)
    with engine_pair(checkpoint, completion_cache=True) as pair:
        first = ask(pair, "a", prompt, greedy(NUM_OUTPUT))
        num_blocks, num_reads = counter(pair.completion.role, "blocks_read"), pair.transport.num_reads
        assert ask(pair, "b", prompt, greedy(NUM_OUTPUT)) == first
        assert counter(pair.completion.role, "blocks_read") == num_blocks
        assert pair.transport.num_reads == num_reads
        pair.run_until(lambda: pair.prompt.scheduler.num_held == 0, "the hand-over is released")
        assert counter(pair.prompt.role, "ends_by_reason_released") == 2
        pair.run_until_drained()


@pytest.mark.parametrize("prompt_cache", [False, True])
@pytest.mark.parametrize("completion_cache", [False, True])
@pytest.mark.parametrize("chunk_handover", [False, True])
def test_mixed_sources_equal_the_baseline(
    checkpoint: Path, prompt_cache: bool, completion_cache: bool, chunk_handover: bool
) -> None:
    """T16: own cache, remote blocks, recomputed; prompts that share beginnings of every length, at once."""
    trunk = tokens(5 * CHUNK, seed=2)
    lengths = (3, 4, CHUNK, CHUNK + 2, 3 * CHUNK - 1, 5 * CHUNK)
    prompts = {str(i): trunk[:length] + tokens(6, seed=10 + i) for i, length in enumerate(lengths)}
    sampling = SamplingParams(max_tokens=NUM_OUTPUT, temperature=1.0, seed=5, ignore_eos=True)
    expected = run_normal(checkpoint, prompts, sampling)
    with engine_pair(
        checkpoint,
        prompt_blocks=128,
        completion_blocks=128,
        prompt_cache=prompt_cache,
        completion_cache=completion_cache,
        chunk_handover=chunk_handover,
    ) as pair:
        for lap in range(2):
            ids = {f"{request_id}-{lap}": prompt for request_id, prompt in prompts.items()}
            for request_id, prompt in ids.items():
                pair.add(request_id, prompt, sampling)
            pair.run_until(lambda ids=ids: all(map(pair.completion.has_ended, ids)), "all answers")
            assert {r.partition("-")[0]: pair.answer(r) for r in ids} == expected
        pair.run_until_drained()


def test_cached_blocks_of_the_prompt_engine_are_announced_with_its_first_chunk(checkpoint: Path) -> None:
    trunk = tokens(4 * CHUNK, seed=3)
    with engine_pair(checkpoint, prompt_cache=True) as pair:
        ask(pair, "a", trunk, greedy(2))
        pair.add("b", trunk + tokens(2 * CHUNK, seed=4), greedy(2))
        pair.prompt.turn()
        before = pair.transport.num_reads
        pair.run_completion_until(lambda: pair.transport.num_reads == before + 1, "the first chunk is read")
        assert pair.transport.num_blocks_in_last_read == 5 * CHUNK // BLOCK_SIZE
        pair.run_until(lambda: pair.completion.has_ended("b"), "the answer")


@pytest.mark.parametrize("completion_block_size", [2, 8])
@pytest.mark.parametrize("chunk_handover", [False, True])
def test_engines_of_unequal_block_sizes_answer_as_one_engine(
    checkpoint: Path, completion_block_size: int, chunk_handover: bool
) -> None:
    trunk = tokens(5 * CHUNK, seed=6)
    prompts = {
        str(length): trunk[:length] for length in (1, 3, 4, 7, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 5 * CHUNK)
    }
    expected = run_normal(checkpoint, prompts, greedy(NUM_OUTPUT))
    with engine_pair(
        checkpoint,
        completion_blocks=512 // completion_block_size,
        completion_block_size=completion_block_size,
        completion_cache=True,
        chunk_handover=chunk_handover,
    ) as pair:
        for lap in range(2):
            for request_id, prompt in prompts.items():
                pair.add(f"{request_id}-{lap}", prompt, greedy(NUM_OUTPUT))
            ids = [f"{request_id}-{lap}" for request_id in prompts]
            pair.run_until(lambda ids=ids: all(map(pair.completion.has_ended, ids)), "all answers")
            assert {r.partition("-")[0]: pair.answer(r) for r in ids} == expected
        assert counter(pair.completion.role, "blocks_skipped") > 0
        pair.run_until_drained()
