"""Engines with `--dtype bf16`, here on the CPU: a pair answers as one engine does; refusals."""

from pathlib import Path

import pytest

from engine.errors import EngineStartError
from tests.engine.pair import greedy
from tests.engine.tensor_parallel.engines import Engine, engine, tiny_checkpoint, turn_both_until
from wire.services import PromptEngineAddress

PROMPT = list(range(30, 51))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "Llama")


def test_a_pair_answers_as_one_engine(checkpoint: Path) -> None:
    with engine(checkpoint, dtype="bf16") as alone:
        alone.add("a", PROMPT, greedy(12))
        expected = alone.run_until_ended("a/0")["a/0"]
    options = {"dtype": "bf16", "transport": "zmq", "verify_kv": True}
    with (
        engine(checkpoint, role="prompt", engine_id="prompt", **options) as prompt,
        engine(checkpoint, role="completion", engine_id="completion", **options) as completion,
    ):
        assert "bfloat16[" in prompt.ready.compatibility["kv_layout"]
        control = prompt.ready.control_address
        assert control is not None
        address = PromptEngineAddress(engine_id="prompt", epoch=1, control_address=control)
        for side in (prompt, completion):
            side.add("a", PROMPT, greedy(12), handover_id="h", prompt_engine=address)
        turn_both_until(prompt, completion, "a/0")
        assert prompt.answers["a/0"].token_ids + completion.answers["a/0"].token_ids == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bf16", "tp": 2}, "--dtype bf16 runs in one process; start it with --tp 1"),
        (
            {"dtype": "bf16", "kernels": "native"},
            "--kernels native do not compute --dtype bf16; start with --kernels auto, or with --dtype fp16w",
        ),
        ({"dtype": "bf16", "device": "cuda"}, "--device cuda: torch finds no GPU here"),
    ],
)
def test_what_does_not_go_together_is_refused(
    checkpoint: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(EngineStartError, match=message):
        Engine(checkpoint, **options)
