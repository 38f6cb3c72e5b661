"""A pair whose completion engine has blocks for less than half of what is asked for kills nobody for it."""

import time
from collections import Counter
from pathlib import Path

import pytest

from tests.engine.pair import DEADLINE_S, EnginePair, engine_pair, greedy, run_normal, tiny_checkpoint

NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT = 8, 20, 28
SMALL_POOL = 22
"""Blocks, the null block included: five prompts fit, fewer than two whole answers do."""
NUM_TOGETHER = 3
"""Requests that the completion engine takes at once, with room for each to grow by 8 tokens."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def run(checkpoint: Path, *, estimate: bool) -> tuple[Counter[str | None], dict[str, list[int]]]:
    """How the requests ended, and the answers of those that were not killed."""
    prompts = prompts_of(NUM_REQUESTS)
    with engine_pair(checkpoint, completion_blocks=SMALL_POOL, admission_estimate=estimate) as pair:
        for request_id, prompt in prompts.items():
            pair.add(request_id, prompt, greedy(NUM_OUTPUT))
        if not estimate:
            gather(pair)
        pair.run_until(lambda: all(map(pair.completion.has_ended, prompts)), "every request has ended")
        pair.run_until_drained()
        ends = {}
        for request_id in prompts:
            end = pair.completion.answers[request_id].end
            assert end is not None
            ends[request_id] = end.finish_reason
        answered = [name for name, reason in ends.items() if reason == "length"]
        return Counter(ends.values()), {name: pair.answer(name) for name in answered}


def gather(pair: EnginePair) -> None:
    """Nobody decodes before as many as fit are there, of whom one can end with a whole answer."""
    until_s = time.monotonic() + DEADLINE_S
    while pair.completion.role.num_handovers() > NUM_REQUESTS - NUM_TOGETHER:
        assert time.monotonic() < until_s
        pair.prompt.turn()
        assert not pair.completion.engine.poll()


def prompts_of(count: int) -> dict[str, list[int]]:
    return {str(i): [3 + (7 * i + j) % 120 for j in range(NUM_PROMPT)] for i in range(count)}


def test_with_the_estimate_everybody_waits_and_is_answered(checkpoint: Path) -> None:
    ends, _ = run(checkpoint, estimate=False)
    assert ends["insufficient_system_resource"] >= 2
    ends, answers = run(checkpoint, estimate=True)
    assert ends == {"length": NUM_REQUESTS}
    assert answers == run_normal(checkpoint, prompts_of(NUM_REQUESTS), greedy(NUM_OUTPUT))
