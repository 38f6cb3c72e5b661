"""Every architecture that transformers computes for us: the logits are its own, however a step is cut."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.cache_utils import DynamicCache

from engine.hf.assembly import inject
from engine.hf.runner import TransformersRunner
from model_files import resolve_model
from tests.engine.builders import TINY, StepOf, batch_of
from tests.engine.hf_families import FAMILIES, TinyForeign
from tests.engine.pair import BLOCK_SIZE
from tests.model_files.fp8_checkpoint import quantise

TOKENS = np.random.default_rng(5).integers(3, 128, 45).tolist()
LIMIT = 1e-6


@pytest.fixture(params=FAMILIES, scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyForeign:
    return TinyForeign.make(tmp_path_factory.mktemp("tiny"), request.param)


def table(first: int, num_tokens: int) -> list[int]:
    """Blocks in falling order, so that neighbours in a sequence are not neighbours in memory."""
    return list(range(first + -(-num_tokens // BLOCK_SIZE) - 1, first - 1, -1))


def run(runner: TransformersRunner, *steps: StepOf) -> torch.Tensor:
    return runner.forward(batch_of(*steps, block_size=BLOCK_SIZE))


def assert_same_probabilities(logits: torch.Tensor, expected: torch.Tensor) -> None:
    assert (logits.softmax(-1) - expected.softmax(-1)).abs().max().item() <= LIMIT


@pytest.mark.parametrize("cuts", [(), (1, 2), (8, 16, 24), (11, 12, 44)])
def test_chunked_is_unchunked_and_what_transformers_computes(
    tiny: TinyForeign, cuts: tuple[int, ...]
) -> None:
    """Logits by their norm against transformers' own cache, cut alike; probabilities against one pass.

    transformers' own logits differ by up to 3e-6 of the norm between cuts and one pass.
    """
    runner, cache = tiny.runner(16), DynamicCache(config=tiny.reference.config)
    for start, end in pairwise((0, *cuts, 45)):
        (logits,) = run(runner, StepOf(TOKENS[:end], start, table(1, 45), state_slot=3))
        cut_alike = tiny.continue_with(TOKENS[start:end], start, cache)
        assert ((logits - cut_alike).norm() / cut_alike.norm()).item() <= LIMIT
        assert_same_probabilities(logits, tiny.logits(TOKENS)[end - 1])


def test_a_step_of_chunks_and_decodes_gives_each_what_it_gives_alone(tiny: TinyForeign) -> None:
    lengths = [(20, 19), (45, 30), (7, 0), (1, 0), (33, 32), (40, 0), (9, 8)]
    steps = [
        StepOf(TOKENS[:end], start, table(1 + 12 * i, end), state_slot=slot)
        for i, ((end, start), slot) in enumerate(zip(lengths, (7, 2, 5, 6, 1, 3, 4), strict=True))
    ]
    runner = tiny.runner(128)
    for step in steps:
        if step.start:
            run(runner, StepOf(step.token_ids[: step.start], 0, step.block_table, step.state_slot))
    expected = tiny.logits(TOKENS)[[end - 1 for end, _ in lengths]]
    assert_same_probabilities(run(runner, *steps), expected)


def test_logits_of_any_rows_are_given(tiny: TinyForeign) -> None:
    runner, expected = tiny.runner(32), tiny.logits(TOKENS)
    run(runner, StepOf(TOKENS[:10], 0, table(1, 20), 1))
    steps = StepOf(TOKENS[:14], 10, table(1, 20), 1), StepOf(TOKENS[:6], 0, table(20, 6), 2)
    rows = np.array([1, 3, 4, 9])
    logits = runner.forward(batch_of(*steps, block_size=BLOCK_SIZE), rows)
    assert_same_probabilities(logits, expected[[11, 13, 0, 5]])


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "deepseek_v3"])
def test_packed_weights_stay_close(tmp_path: Path, name: str) -> None:
    tiny = TinyForeign.make(tmp_path, name, weight_format="fp16w")
    logits = run(tiny.runner(16), StepOf(TOKENS, 0, table(1, 45), 1))[0]
    torch.testing.assert_close(
        logits.log_softmax(-1), tiny.logits(TOKENS)[-1].log_softmax(-1), rtol=0, atol=0.05
    )


def test_an_fp8_checkpoint_of_experts_is_computed_from_the_numbers_that_were_meant(tmp_path: Path) -> None:
    tiny = TinyForeign.make(tmp_path, "qwen3_moe")
    meant = quantise(tmp_path)
    answers = inject(resolve_model(str(tmp_path)), "fp32", BLOCK_SIZE)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(meant, tmp_path / "model.safetensors")
    plain = inject(resolve_model(str(tmp_path)), "fp32", BLOCK_SIZE)
    logits = [
        run(TinyForeign(tmp_path, tiny.reference, model).runner(16), StepOf(TOKENS, 0, table(1, 45)))
        for model in (answers, plain)
    ]
    assert logits[0].equal(logits[1])
    assert not logits[0][0].equal(tiny.logits(TOKENS)[-1])


def test_the_text_model_of_a_wrapper_for_images_is_served(tmp_path: Path) -> None:
    """As Qwen3.5 and Gemma 3 are published; text only."""
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": TINY["hidden_size"],
    }
    config = transformers.Qwen3_5Config(text_config={**TINY, **FAMILIES["qwen3_5"][1]}, vision_config=vision)
    torch.manual_seed(1)
    reference = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    reference.save_pretrained(tmp_path)
    injected = inject(resolve_model(str(tmp_path)), "fp32", BLOCK_SIZE)
    tiny = TinyForeign(tmp_path, reference, injected)
    logits = run(tiny.runner(16), StepOf(TOKENS, 0, table(1, 45), 1))[0]
    assert_same_probabilities(logits, tiny.logits(TOKENS)[-1])
