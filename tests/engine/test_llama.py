from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from engine.config import KernelChoice
from engine.kv_pool import KVLayout
from engine.model.linear import WeightFormat
from engine.model_runner import Runner, load_model_runner
from model_files import ModelFilesError, resolve_model
from tests.engine.builders import StepOf, batch_of, save_tiny_model
from tests.engine.native_build import require_kernels

BLOCK_SIZE, NUM_TOKENS = 4, 20
PROMPT = np.random.default_rng(0).integers(3, 128, 45).tolist()
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILIES = {
    "llama": ("Llama", {}),
    "llama, one kv head for all": ("Llama", {"num_key_value_heads": 1}),
    "llama, a kv head each": ("Llama", {"num_key_value_heads": 6}),
    "llama, tied embeddings": ("Llama", {"tie_word_embeddings": True}),
    "llama, biases everywhere": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, llama3 rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, linear rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 5000.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, sliding window": ("Mistral", {"sliding_window": 11}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3, biases": ("Qwen3", {"attention_bias": True}),
}


@dataclass(frozen=True, slots=True)
class Tiny:
    """A random checkpoint and what transformers makes of it."""

    path: Path
    logits: torch.Tensor
    """float32 [len(PROMPT), vocab]"""
    greedy_ids: list[int]
    """NUM_TOKENS tokens after PROMPT."""


@pytest.fixture(params=FAMILIES, scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    family, options = FAMILIES[request.param]
    path = tmp_path_factory.mktemp("tiny")
    model = save_tiny_model(path, family, **options)
    return Tiny(path, reference_logits(model, PROMPT), reference_tokens(model, PROMPT, NUM_TOKENS))


@pytest.fixture(params=["torch", "native"], autouse=True, scope="module")
def kernels(request: pytest.FixtureRequest) -> KernelChoice:
    """What computes the models of a test."""
    if request.param == "native":
        require_kernels()
    return request.param


def load_runner(
    path: Path, kernels: KernelChoice, weight_format: WeightFormat = "fp32", num_blocks: int = 128
) -> Runner:
    files = resolve_model(str(path))
    kv_bytes = KVLayout.of(files.config(), BLOCK_SIZE).block_bytes * num_blocks
    return load_model_runner(
        files, weight_format=weight_format, block_size=BLOCK_SIZE, kv_bytes=kv_bytes, kernels=kernels
    )


def run(runner: Runner, *steps: StepOf) -> torch.Tensor:
    return runner.forward(batch_of(*steps, block_size=BLOCK_SIZE))


def table(first: int, num_tokens: int) -> list[int]:
    """Blocks in falling order, so that neighbours in a sequence are not neighbours in memory."""
    return list(range(first + -(-num_tokens // BLOCK_SIZE) - 1, first - 1, -1))


def generate(runner: Runner, prompt: list[int], num_tokens: int, chunks: list[int]) -> list[int]:
    """Greedy tokens; the prompt is computed up to each of `chunks`, then to its end."""
    tokens, blocks, start = list(prompt), table(1, len(prompt) + num_tokens), 0
    for end in [*chunks, len(prompt)]:
        logits = run(runner, StepOf(tokens[:end], start, blocks))
        start = end
    for _ in range(num_tokens):
        tokens.append(int(logits.argmax()))
        logits = run(runner, StepOf(tokens, len(tokens) - 1, blocks))
    return tokens[len(prompt) :]


@torch.inference_mode()
def reference_logits(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


@torch.inference_mode()
def reference_tokens(model: transformers.PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def test_every_prefix_gives_the_reference_logits(tiny: Tiny, kernels: KernelChoice) -> None:
    runner = load_runner(tiny.path, kernels)
    for end in (1, 2, 3, 4, 5, 10, 11, 12, 20, 45):
        logits = run(runner, StepOf(PROMPT[:end], 0, table(1, end)))[0]
        torch.testing.assert_close(logits, tiny.logits[end - 1], rtol=1e-4, atol=1e-4)


def test_logits_of_rows_in_the_middle_are_those_of_the_prefix_that_ends_there(
    tiny: Tiny, kernels: KernelChoice
) -> None:
    """A step that verifies drafts needs all of them."""
    runner, rows = load_runner(tiny.path, kernels), [0, 4, 10, 14]
    run(runner, StepOf(PROMPT[:30], 0, table(1, 45)))
    batch = batch_of(StepOf(PROMPT, 30, table(1, 45)), block_size=BLOCK_SIZE)
    logits = runner.forward(batch, np.array(rows))
    torch.testing.assert_close(logits, tiny.logits[30:][rows], rtol=1e-4, atol=1e-4)


def test_greedy_tokens_equal_generate_for_every_chunking(tiny: Tiny, kernels: KernelChoice) -> None:
    runner = load_runner(tiny.path, kernels)
    for chunks in ([], [1], [44], [11, 12, 40], [4, 8, 16, 32], list(range(1, 45))):
        assert generate(runner, PROMPT, NUM_TOKENS, chunks) == tiny.greedy_ids, chunks


def test_a_step_that_mixes_chunks_and_decodes_gives_what_each_gives_alone(
    tiny: Tiny, kernels: KernelChoice
) -> None:
    lengths = [(20, 19), (45, 30), (7, 0), (1, 0), (33, 32), (40, 0)]
    steps = [StepOf(PROMPT[:end], start, table(1 + 12 * i, end)) for i, (end, start) in enumerate(lengths)]
    alone, together = load_runner(tiny.path, kernels), load_runner(tiny.path, kernels)
    for runner in (alone, together):
        for step in steps:
            if step.start:
                run(runner, StepOf(step.token_ids[: step.start], 0, step.block_table))
    expected = torch.cat([run(alone, step) for step in steps])
    torch.testing.assert_close(run(together, *steps), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(together.kv_pool.tensor, alone.kv_pool.tensor, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weight_format", ["fp32", "fp16w"])
def test_an_answer_does_not_depend_on_its_neighbours(
    tmp_path: Path, weight_format: WeightFormat, kernels: KernelChoice
) -> None:
    save_tiny_model(tmp_path, "Llama")
    runner = load_runner(tmp_path, kernels, weight_format)
    steps = [StepOf(PROMPT[i : i + 6 + i], 5 + i, table(1 + 10 * i, 6 + i)) for i in range(8)]
    for step in steps:
        run(runner, StepOf(step.token_ids[: step.start], 0, step.block_table))
    together = run(runner, *steps)
    for row, step in enumerate(steps):
        torch.testing.assert_close(together[row], run(runner, step)[0], rtol=1e-4, atol=1e-4)


def test_short_and_long_sequences_decode_in_groups_of_similar_length(
    tmp_path: Path, kernels: KernelChoice
) -> None:
    save_tiny_model(tmp_path, "Llama", max_position_embeddings=4096)
    runner = load_runner(tmp_path, kernels, num_blocks=1024)
    long = np.random.default_rng(1).integers(3, 128, 1501).tolist()
    steps = [
        StepOf(PROMPT[:10], 9, table(1, 10)),
        StepOf(long, 1500, table(100, 1501)),
        StepOf(PROMPT[:20], 19, table(20, 20)),
        StepOf(long[:1401], 1400, table(500, 1401)),
    ]
    for step in steps:
        run(runner, StepOf(step.token_ids[: step.start], 0, step.block_table))
    together = run(runner, *steps)
    for row, step in enumerate(steps):
        torch.testing.assert_close(together[row], run(runner, step)[0], rtol=1e-4, atol=1e-4)


def test_packed_float16_weights_stay_close_to_fp32(tmp_path: Path, kernels: KernelChoice) -> None:
    save_tiny_model(tmp_path, "Qwen2", initializer_range=0.1)
    step = StepOf(PROMPT, 0, table(1, 45))
    exact = run(load_runner(tmp_path, kernels), step).log_softmax(-1)
    packed = run(load_runner(tmp_path, kernels, "fp16w"), step).log_softmax(-1)
    torch.testing.assert_close(packed, exact, rtol=0, atol=0.02)


def test_a_tensor_of_another_shape_than_the_configuration_is_named(
    tmp_path: Path, kernels: KernelChoice
) -> None:
    save_tiny_model(tmp_path, "Llama")
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 80', '"intermediate_size": 96'))
    with pytest.raises(ModelFilesError, match=r"tensor model\.layers\.\d\.mlp\.\w+\.weight has shape"):
        load_runner(tmp_path, kernels)
