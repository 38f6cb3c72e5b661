"""Runs the model on the batches that the scheduler lays out."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.config import KernelChoice
from engine.errors import ModelNotSupportedError, WeightFormatError
from engine.kv_pool import KVLayout, KVPool
from engine.model.attention import TorchAttention
from engine.model.interface import AttentionBackend, DecoderModel, StepInputs
from engine.model.linear import check_weight_format
from engine.model.loader import load_model
from engine.native.library import choose_runtime
from engine.state_pool import StatePool
from model_files import ModelConfig, ModelFiles
from shared_scheduler import Batch

Int32Array = npt.NDArray[np.int32]
IntArray = npt.NDArray[np.integer]


class ModelBatch(Protocol):
    """The arrays of `shared_scheduler.Batch` that a model needs; T tokens of N sequences."""

    @property
    def token_ids(self) -> Int32Array: ...
    @property
    def positions(self) -> Int32Array: ...
    @property
    def slot_mapping(self) -> Int32Array: ...
    @property
    def seqlens_q(self) -> Int32Array: ...
    @property
    def seqlens_k(self) -> Int32Array: ...
    @property
    def block_tables(self) -> Int32Array: ...


class Runner(Protocol):
    """One model over its pools. `states` is None where the model keeps nothing but keys and values."""

    config: ModelConfig
    kv_pool: KVPool
    kv_shards: tuple[KVPool, ...]
    """The pools of all ranks, ours first: alike but for the heads they hold."""
    states: StatePool | None
    kernels: str
    """What computes the model: native or torch."""
    sliding_window: int | None
    """No layer sees more tokens than this; None: some layer sees all."""

    def forward(self, batch: Batch, logit_rows: IntArray | None = None) -> torch.Tensor:
        """Logits float32 [R, vocab] of these of the T tokens; what the model keeps of all goes to the pools.

        `logit_rows` [R], ascending; None: each sequence's last token.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    kv_bytes: int = 1 << 30
    state_bytes: int | None = None
    """None: two state slots for each of `max_num_seqs`, but not more memory than `kv_bytes`."""
    max_num_seqs: int = 64


class ModelRunner:
    """The runner of the own forward pass in torch."""

    kernels = "torch"

    def __init__(
        self,
        model: DecoderModel,
        config: ModelConfig,
        kv_pool: KVPool,
        attention: AttentionBackend | None = None,
    ) -> None:
        """`attention`: None takes torch's own operations."""
        self._model = model
        self._attention = attention or TorchAttention()
        self.config = config
        self.kv_pool = kv_pool
        self.kv_shards: tuple[KVPool, ...] = (kv_pool,)
        self.states: StatePool | None = None
        self.sliding_window = config.sliding_window

    @torch.inference_mode()
    def forward(self, batch: ModelBatch, logit_rows: IntArray | None = None) -> torch.Tensor:
        """Logits float32 [R, vocab] of these of the T tokens; keys and values of all go to the pool.

        `logit_rows` [R], ascending; None: each sequence's last token.
        """
        if logit_rows is None:
            logit_rows = np.cumsum(batch.seqlens_q) - 1
        plan = self._attention.plan(
            self.kv_pool.layout,
            slot_mapping=batch.slot_mapping,
            seqlens_q=batch.seqlens_q,
            seqlens_k=batch.seqlens_k,
            block_tables=batch.block_tables,
            sliding_window=self.config.sliding_window,
        )
        inputs = StepInputs(
            token_ids=torch.from_numpy(batch.token_ids.astype(np.int64)),
            positions=torch.from_numpy(batch.positions.astype(np.int64)),
            logit_rows=torch.from_numpy(logit_rows.astype(np.int64)),
            attention=plan,
        )
        return self._model.forward(inputs, self.kv_pool)


def load_model_runner(
    files: ModelFiles,
    *,
    weight_format: str = "fp16w",
    block_size: int = 32,
    kv_bytes: int = 1 << 30,
    state_bytes: int | None = None,
    max_num_seqs: int = 64,
    max_model_len: int | None = None,
    num_threads: int | None = None,
    kernels: KernelChoice = "auto",
) -> Runner:
    """Loads the weights, on `num_threads` or all usable cores, and makes the pools.

    `max_model_len` None takes the model's own limit, or what the pool can hold.

    ModelFilesError, ModelNotSupportedError, WeightFormatError, KernelsError or KVPoolError, each with one
    line that says what to do.
    """
    config = files.config()
    checked_format = check_weight_format(weight_format)
    runtime = choose_runtime(kernels, config, num_threads or torch.get_num_threads())
    if checked_format == "q4" and runtime is None:
        raise WeightFormatError("--dtype q4 needs the native kernels, and torch computes this model")
    if config.architecture == "transformers":
        if find_spec("transformers") is None:
            raise ModelNotSupportedError(
                f"{files.name} needs the transformers package: pip install 'tandem-serve[transformers]'"
            )
        from engine.hf.assembly import load_transformers_runner  # imports transformers: seconds

        sizes = PoolSizes(kv_bytes=kv_bytes, state_bytes=state_bytes, max_num_seqs=max_num_seqs)
        return load_transformers_runner(files, checked_format, block_size, sizes)
    pool = KVPool.of_bytes(KVLayout.of(config, block_size), kv_bytes)
    max_positions = num_positions_of(config, max_model_len, pool)
    if runtime is not None:
        from engine.native.loading import load_native_runner  # imports this module

        return load_native_runner(runtime, files, checked_format, pool, max_positions, num_threads)
    model = load_model(files, checked_format, max_positions=max_positions, num_threads=num_threads)
    return ModelRunner(model, config, pool)


def num_positions_of(config: ModelConfig, max_model_len: int | None, pool: KVPool) -> int:
    """How many positions a sequence can ever have."""
    limit = max_model_len or config.max_position_embeddings
    return min(limit, config.max_position_embeddings, pool.num_blocks * pool.layout.block_size)
