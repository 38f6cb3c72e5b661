"""The path for GPUs, run on the CPU: same model, same pool, same tokens; graphs are recorded calls."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.decode_graphs import Run, padded
from engine.device_runner import DeviceRunner, choose_device
from engine.errors import DeviceError
from engine.kv_pool import KVLayout, KVPool
from engine.model.attention_gather import GatherKernel
from engine.model.device_loader import load_device_model
from engine.model.loader import load_model
from engine.model_runner import ModelRunner
from model_files import ModelFiles, resolve_model
from tests.engine.builders import StepOf, TestBatch, batch_of, save_tiny_model

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS = 4, 24
PROMPT = np.random.default_rng(5).integers(3, 127, 21).tolist()
OTHER = np.random.default_rng(6).integers(3, 127, 9).tolist()
FAMILIES = {
    "llama": ("Llama", {}),
    "llama, biases, tied": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral, sliding window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
}


class RecordedGraphs:
    """A graph is the function again, on the very tensors it was captured with."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replayed = 0

    def capture(self, run: Run) -> Run:
        self.num_captured += 1

        def replay() -> torch.Tensor:
            self.num_replayed += 1
            return run()

        return replay


@pytest.fixture(params=FAMILIES, scope="module")
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    family, options = FAMILIES[request.param]
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_model(path, family, **options)
    return resolve_model(str(path))


def device_runner(
    files: ModelFiles, graphs: RecordedGraphs | None, dtype: torch.dtype = torch.float32
) -> DeviceRunner:
    name = "float32" if dtype is torch.float32 else "bfloat16"
    return DeviceRunner(
        load_device_model(files, max_positions=64, device=CPU, dtype=dtype),
        KVPool(KVLayout.of(files.config(), BLOCK_SIZE, name), NUM_BLOCKS),
        GatherKernel(),
        device=CPU,
        max_num_seqs=6,
        max_model_len=64,
        graphs=graphs,
    )


def reference_runner(files: ModelFiles) -> ModelRunner:
    pool = KVPool(KVLayout.of(files.config(), BLOCK_SIZE), NUM_BLOCKS)
    return ModelRunner(load_model(files, "fp32", max_positions=64, num_threads=1), files.config(), pool)


def steps() -> list[tuple[TestBatch, np.ndarray | None]]:
    """Two chunks beside other prompts, three decode steps of one and three sequences, and one with drafts."""
    first, second, third = (9, 2, 11, 3, 4, 5, 17), (1, 7, 8, 18), (12, 13, 19)

    def batch(*parts: StepOf) -> TestBatch:
        return batch_of(*parts, block_size=BLOCK_SIZE)

    return [
        (batch(StepOf(PROMPT[:10], 0, first), StepOf(OTHER[:8], 0, second)), None),
        (batch(StepOf(PROMPT[:20], 10, first), StepOf(OTHER, 8, second), StepOf(OTHER[:5], 0, third)), None),
        (batch(StepOf(PROMPT, 20, first)), None),
        (
            batch(
                StepOf([*PROMPT, 5], 21, first), StepOf([*OTHER, 6], 9, second), StepOf(OTHER[:6], 5, third)
            ),
            None,
        ),
        (
            batch(
                StepOf([*PROMPT, 5, 8], 22, first),
                StepOf([*OTHER, 6, 9], 10, second),
                StepOf(OTHER[:7], 6, third),
            ),
            None,
        ),
        (batch(StepOf([*PROMPT, 5, 8, 7, 6], 23, first), StepOf(OTHER[:9], 7, third)), np.arange(4)),
    ]


def test_steps_give_the_logits_of_the_reference(files: ModelFiles) -> None:
    graphs = RecordedGraphs()
    reference, runner = reference_runner(files), device_runner(files, graphs)
    for batch, rows in steps():
        expected, logits = reference.forward(batch, rows), runner.forward(batch, rows)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    # One sequence of 6 blocks runs as 1 x 8, three as 4 x 8, twice.
    assert (graphs.num_captured, graphs.num_replayed) == (2, 3)
    # Apart from the null block, to which padding rows write, the pools hold the same.
    torch.testing.assert_close(runner.kv_pool.tensor[1:], reference.kv_pool.tensor[1:], rtol=1e-4, atol=1e-4)


def test_bfloat16_is_near_the_reference(files: ModelFiles) -> None:
    reference, runner = reference_runner(files), device_runner(files, RecordedGraphs(), torch.bfloat16)
    for batch, rows in steps():
        expected, logits = reference.forward(batch, rows), runner.forward(batch, rows)
        assert logits.dtype is torch.float32
        # 8 bits of mantissa through three layers of weights of scale 0.3.
        assert torch.nn.functional.cosine_similarity(logits, expected).min() > 0.99


def test_a_padded_step_leaves_no_trace_but_in_the_null_block(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "Llama")
    runner = device_runner(resolve_model(str(tmp_path)), RecordedGraphs())
    tables = ((1, 2), (3, 4), (5, 6))
    runner.forward(batch_of(*(StepOf([7, 8], 1, table) for table in tables), block_size=BLOCK_SIZE))
    written = runner.kv_pool.tensor.abs().amax((1, 2, 3, 4, 5)) > 0
    assert written.nonzero().flatten().tolist() == [0, 1, 3, 5]


@pytest.mark.parametrize(
    ("number", "limit", "expected"), [(1, 6, 1), (2, 6, 2), (3, 6, 4), (5, 6, 6), (6, 6, 6), (9, 64, 16)]
)
def test_sizes_are_padded_to_powers_of_two_up_to_the_limit(number: int, limit: int, expected: int) -> None:
    assert padded(number, limit) == expected


def test_a_gpu_is_taken_for_bf16_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", "bf16") == choose_device("cpu", "fp16w") == CPU
    with pytest.raises(DeviceError, match="--device cuda: torch finds no GPU here"):
        choose_device("cuda", "bf16")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert choose_device("auto", "bf16") == choose_device("cuda", "bf16") == torch.device("cuda", 0)
    assert choose_device("auto", "fp16w") == choose_device("cpu", "bf16") == CPU
    with pytest.raises(DeviceError, match="--device cuda computes in --dtype bf16, got --dtype fp16w"):
        choose_device("cuda", "fp16w")
