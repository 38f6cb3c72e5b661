"""Pairs whose engines are shared out to unequally many real processes, over real transports."""

from pathlib import Path

import pytest

from kv_transfer.transports import nixl
from tests.engine.pair import greedy, run_normal
from tests.engine.tensor_parallel.engines import Engine, engine, tiny_checkpoint, turn_both_until
from tests.kv_transfer.processes import needs_nixl
from wire.services import CompletionEngineAddress, PromptEngineAddress

PROMPTS = {"a": [5, 9, 70, 33, 4, 18, 99, 23, 6], "b": list(range(30, 69))}
NUM_OUTPUT = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "Qwen3")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, list[int]]:
    return run_normal(checkpoint, PROMPTS, greedy(NUM_OUTPUT))


@pytest.fixture
def described_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large pools have too many pieces of single heads to describe them all beforehand."""
    monkeypatch.setattr(nixl, "MAX_PREPARED", 0)


def address(prompt: Engine) -> PromptEngineAddress:
    assert prompt.ready.control_address is not None
    return PromptEngineAddress(engine_id="prompt", epoch=1, control_address=prompt.ready.control_address)


def lender(completion: Engine) -> CompletionEngineAddress | None:
    control = completion.ready.control_address
    if control is None:
        return None
    return CompletionEngineAddress(engine_id="completion", epoch=1, control_address=control)


def ask(prompt: Engine, completion: Engine, name: str, tokens: list[int]) -> list[int]:
    for side in (prompt, completion):
        side.add(
            name,
            tokens,
            greedy(NUM_OUTPUT),
            handover_id=f"handover-{name}",
            prompt_engine=address(prompt),
            previous_engine=lender(completion),
        )
    turn_both_until(prompt, completion, f"{name}/0")
    return prompt.answers[f"{name}/0"].token_ids + completion.answers[f"{name}/0"].token_ids


def check_pair(
    checkpoint: Path,
    expected: dict[str, list[int]],
    transport: str,
    prompt_tp: int,
    completion_tp: int,
    **others: str,
) -> None:
    options = {
        "transport": transport,
        "verify_kv": True,
        "pull_back_min_tokens": 8,
        "pull_back_wait_s": 20.0,
        **others,
    }
    with (
        engine(checkpoint, role="prompt", engine_id="prompt", tp=prompt_tp, **options) as prompt,
        engine(
            checkpoint, role="completion", engine_id="completion", tp=completion_tp, **options
        ) as completion,
    ):
        assert prompt.ready.compatibility_hash == completion.ready.compatibility_hash
        for name, tokens in PROMPTS.items():
            assert ask(prompt, completion, name, tokens) == expected[name]
        # The next turn: P fetches from D what D alone has of the answer.
        second = PROMPTS["b"] + expected["b"] + [7]
        answer = ask(prompt, completion, "second", second)
        assert prompt.engine.stats().transfer["pull_back_tokens"] > 0
        assert answer == run_normal(checkpoint, {"second": second}, greedy(NUM_OUTPUT))["second"]


def test_one_rank_hands_over_to_two_through_zmq(checkpoint: Path, expected: dict[str, list[int]]) -> None:
    check_pair(checkpoint, expected, "zmq", 1, 2, kernels="torch")


@needs_nixl
@pytest.mark.usefixtures("described_pieces")
def test_two_ranks_hand_over_to_one_through_nixl(checkpoint: Path, expected: dict[str, list[int]]) -> None:
    check_pair(checkpoint, expected, "nixl", 2, 1)


@needs_nixl
def test_equal_ranks_hand_over_whole_blocks(checkpoint: Path, expected: dict[str, list[int]]) -> None:
    check_pair(checkpoint, expected, "auto", 2, 2)
