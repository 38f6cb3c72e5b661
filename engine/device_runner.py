"""Runs the own forward on a device: decode steps as captured graphs, all others as they come."""

import numpy as np
import torch

from engine.config import DeviceName
from engine.decode_graphs import CudaGraphs, DecodeGraphs, Graphs
from engine.errors import DeviceError
from engine.kv_pool import KVLayout, KVPool
from engine.model.attention_flashinfer import FlashInferKernel, flashinfer_kernel
from engine.model.attention_gather import GatherKernel
from engine.model.attention_varlen import paged_varlen
from engine.model.device_llama import DeviceLlama
from engine.model.device_loader import load_device_model
from engine.model.interface import StepInputs
from engine.model.paged import PagedAttention, PagedKernel
from engine.model_runner import IntArray, ModelBatch, num_positions_of
from engine.state_pool import StatePool
from model_files import ModelConfig, ModelFiles

DEVICE_DTYPE = "bf16"


def choose_device(name: DeviceName, dtype: str) -> torch.device:
    """Where the model runs; `DeviceError` if it cannot. `auto`: on a GPU for bf16, where there is one."""
    if name == "cpu" or (name == "auto" and dtype != DEVICE_DTYPE):
        return torch.device("cpu")
    if torch.cuda.is_available():
        if dtype != DEVICE_DTYPE:
            raise DeviceError(f"--device cuda computes in --dtype {DEVICE_DTYPE}, got --dtype {dtype}")
        return torch.device("cuda", torch.cuda.current_device())
    if name == "auto":
        return torch.device("cpu")
    raise DeviceError("--device cuda: torch finds no GPU here; start with --device cpu")


def choose_kernel(device: torch.device) -> tuple[PagedKernel, str]:
    """The best paged attention there is on `device`, and why not a better one."""
    if device.type != "cuda":
        return GatherKernel(), "torch on the CPU"
    flashinfer = flashinfer_kernel(device)
    if not isinstance(flashinfer, str):
        return flashinfer, "flashinfer"
    varlen = paged_varlen()
    if not isinstance(varlen, str):
        return varlen, f"torch's varlen attention with FA3 ({flashinfer})"
    return GatherKernel(), f"blocks are gathered ({flashinfer}; {varlen})"


class DeviceRunner:
    """`Runner` of a `DeviceLlama`. Logits stay on the device."""

    kernels = "torch"

    def __init__(
        self,
        model: DeviceLlama,
        kv_pool: KVPool,
        kernel: PagedKernel,
        *,
        device: torch.device,
        max_num_seqs: int,
        max_model_len: int,
        graphs: Graphs | None,
    ) -> None:
        """`graphs`: None runs decode steps as they come too."""
        if kv_pool.layout.block_size % kernel.block_multiple:
            raise DeviceError(
                f"--block-size {kv_pool.layout.block_size} does not suit this GPU's attention; "
                f"choose a multiple of {kernel.block_multiple}"
            )
        self.model = model
        self.config: ModelConfig = model.config
        self.kv_pool = kv_pool
        self.kv_shards: tuple[KVPool, ...] = (kv_pool,)
        self.states: StatePool | None = None
        self.sliding_window = self.config.sliding_window
        self._attention = PagedAttention(kernel, device)
        self._graphs: DecodeGraphs | None = None
        if graphs is not None:
            self._graphs = DecodeGraphs(
                model,
                kv_pool,
                kernel,
                graphs,
                device=device,
                max_num_seqs=max_num_seqs,
                max_width=-(-max_model_len // kv_pool.layout.block_size),
                window=self.sliding_window,
            )

    @torch.inference_mode()
    def forward(self, batch: ModelBatch, logit_rows: IntArray | None = None) -> torch.Tensor:
        """Logits float32 [R, vocab] on the device, valid until the next call."""
        if logit_rows is None:
            logit_rows = np.cumsum(batch.seqlens_q) - 1
        num_sequences = len(batch.seqlens_q)
        is_decode = len(batch.token_ids) == num_sequences == len(logit_rows)
        if self._graphs is not None and is_decode and self._graphs.takes(num_sequences):
            return self._graphs.run(batch.token_ids, batch.slot_mapping, batch.seqlens_k, batch.block_tables)
        step = self._attention.plan(
            self.kv_pool.layout,
            slot_mapping=batch.slot_mapping,
            seqlens_q=batch.seqlens_q,
            seqlens_k=batch.seqlens_k,
            block_tables=batch.block_tables,
            sliding_window=self.sliding_window,
        )
        rows = (batch.token_ids, batch.positions, logit_rows)
        tokens, positions, wanted = (
            torch.from_numpy(each.astype(np.int64)).to(self._attention.device) for each in rows
        )
        return self.model.forward(StepInputs(tokens, positions, wanted, step), self.kv_pool)


def load_device_runner(
    files: ModelFiles,
    device: torch.device,
    *,
    block_size: int,
    kv_bytes: int,
    max_num_seqs: int,
    max_model_len: int | None,
) -> tuple[DeviceRunner, str]:
    """The runner, and in words which attention it uses."""
    config = files.config()
    if config.architecture == "transformers":
        raise DeviceError(
            f"--dtype {DEVICE_DTYPE}: {files.name} is computed by the transformers package, on the CPU; "
            "start it with --dtype fp32 and --device cpu"
        )
    layout = KVLayout.of(config, block_size, "bfloat16")
    pool = KVPool(layout, kv_bytes // layout.block_bytes, device=device)
    max_positions = num_positions_of(config, max_model_len, pool)
    kernel, words = choose_kernel(device)
    model = load_device_model(files, max_positions=max_positions, device=device, dtype=torch.bfloat16)
    captures = device.type == "cuda" and not isinstance(kernel, FlashInferKernel)
    runner = DeviceRunner(
        model,
        pool,
        kernel,
        device=device,
        max_num_seqs=max_num_seqs,
        max_model_len=max_positions,
        graphs=CudaGraphs() if captures else None,
    )
    return runner, words
