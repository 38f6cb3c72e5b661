"""T12: the pair answers as one engine, also where pools are so small that blocks are used again and again."""

import random
from pathlib import Path

import pytest

from tests.engine.pair import EnginePair, engine_pair, greedy, run_normal, tiny_checkpoint

NUM_PROMPTS = 200
SAMPLING = greedy(3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    chance = random.Random(12)
    return {
        f"r{index}": [chance.randrange(3, 60) for _ in range(chance.choice((1, 3, 4, 5, 8, 9, 16, 23)))]
        for index in range(NUM_PROMPTS)
    }


@pytest.fixture(scope="module")
def expected(checkpoint: Path, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    return run_normal(checkpoint, prompts, SAMPLING)


def answer_all(pair: EnginePair, prompts: dict[str, list[int]], num_at_once: int) -> dict[str, list[int]]:
    waiting = list(prompts)
    while waiting:
        batch, waiting = waiting[:num_at_once], waiting[num_at_once:]
        for request_id in batch:
            pair.add(request_id, prompts[request_id], SAMPLING)
        pair.run_until(lambda batch=batch: all(map(pair.completion.has_ended, batch)), "answers")
    return {request_id: pair.answer(request_id) for request_id in prompts}


@pytest.mark.parametrize(("num_prompts", "num_at_once"), [(40, 1), (NUM_PROMPTS, 64)])
def test_t12_prompts_of_mixed_length_equal_one_engine_under_block_reuse_pressure(
    checkpoint: Path,
    prompts: dict[str, list[int]],
    expected: dict[str, list[int]],
    num_prompts: int,
    num_at_once: int,
) -> None:
    some = dict(list(prompts.items())[:num_prompts])
    # The estimate: without it some would end for want of blocks, depending on how fast hand-overs arrive.
    small = {"prompt_blocks": 24, "completion_blocks": 24, "admission_estimate": True}
    with engine_pair(checkpoint, **small, verify_kv=True) as pair:
        assert answer_all(pair, some, num_at_once) == {name: expected[name] for name in some}
        pair.run_until_drained()
