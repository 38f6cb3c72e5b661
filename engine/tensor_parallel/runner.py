"""The runner of rank 0: tells the other ranks of each step, and computes its own part of it."""

import socket
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but the stubs do not say so

from engine.config import KernelChoice
from engine.errors import TensorParallelError, WeightFormatError
from engine.kv_pool import KVLayout, KVPool, check_available, share
from engine.model.interface import AttentionBackend, DecoderModel
from engine.model.linear import WeightFormat
from engine.model.shards import Shard, check_q4_groups, check_shards, local_config
from engine.model_runner import IntArray, ModelBatch, ModelRunner, num_positions_of
from engine.native.library import choose_runtime
from engine.tensor_parallel.collectives import LOOPBACK, RankCollectives
from engine.tensor_parallel.loading import load_shard
from engine.tensor_parallel.messages import RankConfig, Step
from engine.tensor_parallel.ranks import RankProcesses
from kv_transfer.memory import SharedRegion
from model_files import ModelConfig, ModelFiles
from shared_scheduler import GroupError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """What the ranks of one engine are started with."""

    model: str
    """As `--model` has it."""
    size: int
    weight_format: WeightFormat
    kernels: KernelChoice
    block_size: int
    kv_bytes: int
    """Of all ranks together."""
    max_model_len: int | None
    num_threads: int
    """Of all ranks together."""
    timeout_s: float
    log_level: str
    directory: str | None = None
    """Where the sockets between the ranks are made; None takes the system's place for temporary files."""

    @property
    def threads_per_rank(self) -> int:
        return max(1, self.num_threads // self.size)


class TensorParallelRunner(ModelRunner):
    """Rank 0 of a model whose other ranks compute in `ranks`."""

    def __init__(
        self,
        model: DecoderModel,
        config: ModelConfig,
        kv_shards: tuple[KVPool, ...],
        ranks: RankProcesses,
        *,
        attention: AttentionBackend,
        kernels: str,
    ) -> None:
        """`config`: of the whole model; `kv_shards`: the pools of all ranks, mapped here."""
        super().__init__(model, config, kv_shards[0], attention)
        self.kernels = kernels
        self.kv_shards = kv_shards
        self.ranks = ranks

    @torch.inference_mode()
    def forward(self, batch: ModelBatch, logit_rows: IntArray | None = None) -> torch.Tensor:
        """As `ModelRunner.forward`; `GroupError` when a rank is lost."""
        if logit_rows is None:
            logit_rows = np.cumsum(batch.seqlens_q) - 1
        with self.ranks.explained():
            self.ranks.send(Step.of(batch, logit_rows))
            return super().forward(batch, logit_rows)


def load_tensor_parallel_runner(
    files: ModelFiles, options: RankOptions, wake: Callable[[], None]
) -> TensorParallelRunner:
    """Starts the other ranks and loads our part beside them; they are ended by `runner.ranks.close()`.

    `TensorParallelError` where the model cannot be shared out so, or a rank cannot start; else as
    `load_model_runner`. All ranks compute with the same kernels. `wake` is called from a thread when a rank
    is lost.
    """
    config = files.config()
    if config.architecture == "transformers":
        raise TensorParallelError(
            f"--tp {options.size}: {files.name} is computed by the transformers package, in one process; "
            "start it with --tp 1"
        )
    check_shards(config, options.size)
    torch.set_num_threads(options.threads_per_rank)
    shard = Shard(0, options.size)
    runtime = choose_runtime(options.kernels, local_config(config, shard), options.threads_per_rank)
    if options.weight_format == "q4" and runtime is None:
        raise WeightFormatError("--dtype q4 needs the native kernels, and torch computes this model")
    if options.weight_format == "q4":
        check_q4_groups(config, options.size)
    kernels: KernelChoice = "torch" if runtime is None else "native"
    kv_shards = make_pools(config, options)
    max_positions = num_positions_of(config, options.max_model_len, kv_shards[0])
    ranks = RankProcesses(wake, options.directory)
    try:
        store = _store()
        ranks.start(
            [
                _rank_config(rank, options, kernels, ranks, pool, max_positions, store.port)
                for rank, pool in enumerate(kv_shards[1:], 1)
            ]
        )
        ranks.wait_until_here()
        collectives = _connect(store, options, ranks)
        model, attention = load_shard(
            files,
            options.weight_format,
            runtime=runtime,
            max_positions=max_positions,
            num_threads=options.threads_per_rank,
            shard=shard,
            collectives=collectives,
        )
        ranks.wait_until_loaded()
    except BaseException:
        ranks.close()
        raise
    return TensorParallelRunner(model, config, kv_shards, ranks, attention=attention, kernels=kernels)


def _connect(store: TCPStore, options: RankOptions, ranks: RankProcesses) -> RankCollectives:
    """`TensorParallelError` where that fails, with the rank that is gone if there is one."""
    try:
        with ranks.explained():
            return RankCollectives.connect(
                store, 0, options.size, timeout_s=options.timeout_s, device=torch.device("cpu")
            )
    except GroupError as error:
        raise TensorParallelError(str(error)) from error


def make_pools(config: ModelConfig, options: RankOptions) -> tuple[KVPool, ...]:
    """A pool for each rank, of equally many blocks; those of the others are in shared memory."""
    layouts = [
        KVLayout.of(local_config(config, Shard(rank, options.size)), options.block_size)
        for rank in range(options.size)
    ]
    bytes_of_all = sum(layout.block_bytes for layout in layouts)
    num_blocks = options.kv_bytes // bytes_of_all
    # Each pool alone would find all the memory still free: nothing is touched yet.
    check_available(num_blocks * bytes_of_all, "KV pool of all ranks", "--kv-bytes")
    ours, *others = layouts
    return (
        KVPool(ours, num_blocks),
        *(KVPool(layout, num_blocks, share(num_blocks * layout.block_bytes)) for layout in others),
    )


def _rank_config(
    rank: int,
    options: RankOptions,
    kernels: KernelChoice,
    ranks: RankProcesses,
    pool: KVPool,
    max_positions: int,
    store_port: int,
) -> RankConfig:
    assert isinstance(pool.memory, SharedRegion)
    return RankConfig(
        rank=rank,
        size=options.size,
        model=options.model,
        weight_format=options.weight_format,
        kernels=kernels,
        max_positions=max_positions,
        block_size=options.block_size,
        num_blocks=pool.num_blocks,
        num_threads=options.threads_per_rank,
        pool_fd=pool.memory.fd,
        store_port=store_port,
        timeout_s=options.timeout_s,
        step_endpoint=ranks.step_endpoint(rank),
        report_endpoint=ranks.report_endpoint,
        log_level=options.log_level,
    )


def _store() -> TCPStore:
    """Where the ranks meet: on this machine's loopback and nowhere else."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        return TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
