"""Ranks that share a model out compute what one engine computes; here each is a thread, over real gloo."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but the stubs do not say so

from engine.config import KernelChoice
from engine.errors import TensorParallelError
from engine.kv_pool import KVLayout, KVPool
from engine.model.shards import Shard, check_shards, local_config
from engine.model_runner import ModelRunner
from engine.native.library import choose_runtime
from engine.tensor_parallel.collectives import RankCollectives
from engine.tensor_parallel.loading import load_shard
from model_files import ModelFiles, resolve_model
from tests.engine.builders import StepOf, batch_of, save_tiny_model
from tests.engine.native_build import require_kernels

BLOCK_SIZE = 4
CPU = torch.device("cpu")
PROMPT = np.random.default_rng(5).integers(3, 127, 21).tolist()
OTHER = np.random.default_rng(6).integers(3, 127, 9).tolist()

CHECKPOINTS = {
    "llama, heads split": ("Llama", {"intermediate_size": 96}, 2),
    "llama, kv heads replicated": ("Llama", {"num_key_value_heads": 1, "intermediate_size": 96}, 2),
    "llama, more ranks than kv heads": (
        "Llama",
        {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96},
        4,
    ),
    "llama, biases, odd vocabulary": (
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "vocab_size": 127,
            "intermediate_size": 96,
            "num_key_value_heads": 3,
        },
        3,
    ),
    "mistral, sliding window": ("Mistral", {"sliding_window": 11}, 2),
    "qwen2, tied embeddings": ("Qwen2", {"tie_word_embeddings": True}, 2),
    "qwen3": ("Qwen3", {}, 2),
}


def rank_runner(
    files: ModelFiles, shard: Shard, store: HashStore | None, kernels: KernelChoice = "torch"
) -> ModelRunner:
    collectives = None
    if store is not None:
        collectives = RankCollectives.connect(store, shard.rank, shard.size, timeout_s=30.0, device=CPU)
    config = local_config(files.config(), shard)
    model, attention = load_shard(
        files,
        "fp32",
        runtime=choose_runtime(kernels, config, num_threads=1),
        max_positions=64,
        num_threads=1,
        shard=shard,
        collectives=collectives,
    )
    return ModelRunner(model, config, KVPool(KVLayout.of(config, BLOCK_SIZE), 16), attention)


def two_steps(runner: ModelRunner) -> torch.Tensor:
    """A chunk and then the rest of a prompt beside another one that decodes."""
    first, second = (9, 2, 11, 3, 4, 5), (1, 7, 8)
    runner.forward(
        batch_of(StepOf(PROMPT[:10], 0, first), StepOf(OTHER[:8], 0, second), block_size=BLOCK_SIZE)
    )
    batch = batch_of(StepOf(PROMPT, 10, first), StepOf(OTHER, 8, second), block_size=BLOCK_SIZE)
    return runner.forward(batch, np.arange(5, 12))


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_ranks_together_give_the_logits_of_the_whole_model(
    name: str, kernels: KernelChoice, tmp_path: Path
) -> None:
    if kernels == "native":
        require_kernels()
    family, options, size = CHECKPOINTS[name]
    save_tiny_model(tmp_path, family, **options)
    files = resolve_model(str(tmp_path))
    whole = rank_runner(files, Shard(), None)
    expected = two_steps(whole)
    store = HashStore()

    def run(rank: int) -> tuple[torch.Tensor, KVPool]:
        runner = rank_runner(files, Shard(rank, size), store, kernels)
        return two_steps(runner), runner.kv_pool

    with ThreadPoolExecutor(size) as threads:
        ranks = list(threads.map(run, range(size)))
    logits = ranks[0][0]
    assert logits.shape == expected.shape
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert all(other.shape == (7, 0) for other, _ in ranks[1:])
    for rank, (_, pool) in enumerate(ranks):
        heads = Shard(rank, size).kv_heads(files.config().num_kv_heads)
        ours = whole.kv_pool.tensor[:, :, :, :, heads.start : heads.stop]
        torch.testing.assert_close(pool.tensor, ours, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (2, r"--tp 2 does not divide num_heads 9 of this model; choose a divisor, one of 1, 3"),
        (9, r"--tp 9 does not divide intermediate_size 1536"),
    ],
)
def test_a_size_that_does_not_divide_the_embedded_model_is_refused(size: int, message: str) -> None:
    config = resolve_model("smollm2-135m-instruct").config()
    check_shards(config, 3)
    with pytest.raises(TensorParallelError, match=message):
        check_shards(config, size)


def test_kv_heads_that_are_neither_split_nor_shared_evenly_are_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "Llama", num_attention_heads=12, num_key_value_heads=3, intermediate_size=96)
    with pytest.raises(TensorParallelError, match=r"--tp 2: 3 KV heads cannot be shared out to 2 ranks"):
        check_shards(resolve_model(str(tmp_path)).config(), 2)
