"""No token comes from KV that is missing, wrong, or of a hand-over that has expired meanwhile."""

import time
from pathlib import Path

import pytest

from tests.engine.pair import EnginePair, engine_pair, greedy, run_normal, tiny_checkpoint

PROMPT = list(range(3, 3 + 20))
"""Five blocks."""
OTHERS = {f"other-{index}": [40 + index + i for i in range(20)] for index in range(3)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def failure_code(pair: EnginePair, request_id: str) -> str | None:
    """The error code that ended it on the completion engine, which gave no token."""
    answer = pair.completion.answers[request_id]
    assert answer.token_ids == []
    assert answer.end is not None
    assert answer.end.failure is not None
    return answer.end.failure.error.code


@pytest.mark.parametrize("completion_block_size", [4, 8, 2])
def test_verified_answers_are_those_of_one_engine(checkpoint: Path, completion_block_size: int) -> None:
    expected = run_normal(checkpoint, {"a": PROMPT, **OTHERS}, greedy(4))
    with engine_pair(checkpoint, verify_kv=True, completion_block_size=completion_block_size) as pair:
        for request_id, prompt in {"a": PROMPT, **OTHERS}.items():
            pair.add(request_id, prompt, greedy(4))
        pair.run_until(lambda: all(pair.completion.has_ended(id_) for id_ in expected), "answers")
        assert {id_: pair.answer(id_) for id_ in expected} == expected
        pair.run_until_drained()


@pytest.mark.parametrize("chunk_handover", [True, False])
@pytest.mark.parametrize("corrupt", [{1}, {2, 3}, {5}])
def test_t13_a_load_failure_injected_on_some_blocks_is_detected(
    checkpoint: Path, corrupt: set[int], chunk_handover: bool
) -> None:
    with engine_pair(checkpoint, verify_kv=True, chunk_handover=chunk_handover) as pair:
        pair.transport.corrupt = corrupt
        pair.add("a", PROMPT, greedy(4))
        pair.run_until(lambda: pair.completion.has_ended("a"), "the failure")
        assert failure_code(pair, "a") == "handover_corrupt"
        pair.run_until_drained()
        pair.transport.corrupt = set()
        pair.add("b", PROMPT, greedy(4))
        pair.run_until(lambda: pair.completion.has_ended("b"), "an answer after it")
        assert {"b": pair.answer("b")} == run_normal(checkpoint, {"b": PROMPT}, greedy(4))


@pytest.mark.parametrize("verify_kv", [True, False])
def test_a_read_of_an_expired_handover_never_yields_a_token_even_when_its_blocks_were_reused_meanwhile(
    checkpoint: Path, verify_kv: bool
) -> None:
    """The source's clock jumps: its lease is over while the reader still believes in it."""
    jumped_s = 0.0

    def source_clock() -> float:
        return time.monotonic() + jumped_s

    with engine_pair(
        checkpoint,
        prompt_blocks=16,
        verify_kv=verify_kv,
        source_clock=source_clock,
    ) as pair:
        pair.transport.stalled = True
        pair.add("a", PROMPT, greedy(4))
        pair.run_until(lambda: pair.transport.num_reads > 0, "the read begins")
        jumped_s = 100.0
        pair.run_until(lambda: pair.prompt.is_drained, "the lease is over")
        for request_id, prompt in OTHERS.items():
            pair.add_prompt(request_id, prompt, greedy(4))
            pair.run_until(lambda: pair.prompt.is_drained, "the blocks are used again")
        pair.transport.stalled = False
        pair.run_until(lambda: pair.completion.has_ended("a"), "the failure")
        assert failure_code(pair, "a") in ("handover_expired", "handover_corrupt")
        pair.run_until_drained()
