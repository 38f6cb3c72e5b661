"""The paged kernel of the package flashinfer, where that is installed.

One wrapper serves prompts and decode steps. It plans on the host, once for each step, so steps with it are
not captured in graphs.
"""

from typing import Protocol

import torch

from engine.kv_pool import KVPool
from engine.model.paged import PagedStep

WORKSPACE_BYTES = 128 << 20


class Wrapper(Protocol):
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`, what we use of it."""

    def plan(self, *arguments: object, **options: object) -> None: ...

    def run(self, queries: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor: ...


class FlashInferKernel:
    block_multiple = 1

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = wrapper
        self._planned: PagedStep | None = None

    def __call__(self, step: PagedStep, pool: KVPool, layer: int, queries: torch.Tensor) -> torch.Tensor:
        if step is not self._planned:
            self._plan(step, pool, queries)
            self._planned = step
        pages = pool.tensor[:, layer]
        return self._wrapper.run(queries, (pages[:, :, 0], pages[:, :, 1]))

    def _plan(self, step: PagedStep, pool: KVPool, queries: torch.Tensor) -> None:
        """Block tables as flashinfer wants them: the used entries of all rows in one list."""
        layout = pool.layout
        lengths = step.seqlens_k.cpu()
        num_pages = -(-lengths // layout.block_size)
        starts = torch.cat((torch.zeros(1, dtype=torch.int32), num_pages.cumsum(0).int()))
        width = step.block_tables.shape[1]
        used = torch.arange(width) < num_pages[:, None]
        self._wrapper.plan(
            step.cu_seqlens_q,
            starts.to(queries.device),
            step.block_tables[used.to(queries.device)],
            ((lengths - 1) % layout.block_size + 1).int().to(queries.device),
            queries.shape[1],
            layout.num_kv_heads,
            layout.head_dim,
            layout.block_size,
            causal=True,
            window_left=-1 if step.window is None else step.window - 1,
            q_data_type=queries.dtype,
        )


def flashinfer_kernel(device: torch.device) -> FlashInferKernel | str:
    """The kernel, or why it cannot be had here."""
    try:
        import flashinfer  # type: ignore[import-not-found]  # optional, and only for GPUs
    except ImportError as error:
        return f"flashinfer is not installed ({error})"
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return FlashInferKernel(flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD"))
