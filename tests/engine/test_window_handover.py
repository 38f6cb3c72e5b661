"""Where every layer has a window, a hand-over moves only the blocks that the window still shows."""

import random

import pytest

from engine.model_runner import Runner
from tests.engine.hf_families import TinyForeign
from tests.engine.pair import BLOCK_SIZE, EnginePair, engine_pair, greedy, tiny_runner

WINDOW = 11
NUM_TOKENS = 8
GARBAGE = 1e3


@pytest.fixture(scope="module", params=["silu", "gelu"], ids=["own forward", "transformers"])
def mistral(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyForeign:
    path = tmp_path_factory.mktemp("tiny")
    return TinyForeign.save(
        path, "Mistral", {"sliding_window": WINDOW, "hidden_act": request.param, "initializer_range": 0.1}
    )


def prompts() -> dict[str, list[int]]:
    chance = random.Random(2)
    return {str(n): [chance.randrange(3, 128) for _ in range(n)] for n in (3, 10, 14, 15, 16, 40)}


def num_live_blocks(num_tokens: int) -> int:
    """Of a prompt: those with a key that the token behind it sees."""
    return sum(
        any(num_tokens - WINDOW < token < num_tokens for token in range(first, first + BLOCK_SIZE))
        for first in range(0, num_tokens, BLOCK_SIZE)
    )


def counters(pair: EnginePair) -> dict[str, float]:
    return pair.completion.engine.stats().transfer


@pytest.mark.parametrize("n", [1, 2])
def test_only_live_blocks_move_and_answers_stay_the_same(mistral: TinyForeign, n: int) -> None:
    def dirty_runner(num_blocks: int) -> Runner:
        runner = tiny_runner(mistral.checkpoint, num_blocks)
        runner.kv_pool.tensor.fill_(GARBAGE)
        return runner

    with engine_pair(mistral.checkpoint, make_runner=dirty_runner) as pair:
        for request_id, prompt in prompts().items():
            pair.add(request_id, prompt, greedy(NUM_TOKENS), n)
        pair.run_until(lambda: all(pair.completion.has_ended(r) for r in prompts()), "all answers")
        for request_id, prompt in prompts().items():
            for choice in range(n):
                assert pair.answer(request_id, choice) == mistral.generate(prompt, NUM_TOKENS)
        live = sum(num_live_blocks(len(prompt)) for prompt in prompts().values())
        all_blocks = sum(-(-len(prompt) // BLOCK_SIZE) for prompt in prompts().values())
        assert counters(pair)["blocks_read"] == live
        assert counters(pair)["blocks_skipped"] == all_blocks - live > 0
        pair.run_until_drained()
