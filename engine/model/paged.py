"""Attention over the paged pool on a device: what kernels are given, and the backend that plans a step.

Everything is in tensors of the device that a captured graph may read again after they were filled anew: no
kernel may look at their values from the host.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.kv_pool import KVLayout, KVPool
from engine.model.interface import Int32Array


@dataclass(frozen=True, slots=True)
class HostLengths:
    """The lengths as the host knows them, of steps that are never captured."""

    seqlens_q: list[int]
    seqlens_k: list[int]


@dataclass(frozen=True, slots=True)
class PagedStep:
    """T tokens of N sequences; tables are W blocks wide."""

    write_rows: torch.Tensor
    """int64 [num_layers, T]: rows of `KVPool.token_rows`."""
    cu_seqlens_q: torch.Tensor
    """int32 [N + 1]"""
    seqlens_k: torch.Tensor
    """int32 [N]: keys of each sequence, the new ones included."""
    block_tables: torch.Tensor
    """int32 [N, W]"""
    max_seqlen_q: int
    max_seqlen_k: int
    """At least the longest; in a graph, what its tables can hold."""
    window: int | None
    host: HostLengths | None
    """None where every sequence has one new token."""
    kernel: "PagedKernel"

    def attend(self, pool: KVPool, layer: int, qkv: torch.Tensor, num_heads: int) -> torch.Tensor:
        """`StepAttention`."""
        head_dim = pool.layout.head_dim
        queries = qkv[:, : num_heads * head_dim].view(len(qkv), num_heads, head_dim)
        pool.token_rows.index_copy_(0, self.write_rows[layer], qkv[:, num_heads * head_dim :])
        return self.kernel(self, pool, layer, queries).reshape(len(qkv), -1)


class PagedKernel(Protocol):
    """One way to compute paged attention."""

    @property
    def block_multiple(self) -> int:
        """`--block-size` must be a multiple of this."""
        ...

    def __call__(self, step: PagedStep, pool: KVPool, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """[T, heads, D] -> [T, heads, D]: each token over the keys of its sequence up to its own."""
        ...


def decode_step(
    kernel: PagedKernel,
    layout: KVLayout,
    *,
    slots: torch.Tensor,
    seqlens_k: torch.Tensor,
    block_tables: torch.Tensor,
    window: int | None,
) -> PagedStep:
    """One token for each sequence, in tensors of the device; nothing is read back."""
    num_sequences, width = block_tables.shape
    return PagedStep(
        write_rows_of(layout, slots),
        torch.arange(num_sequences + 1, dtype=torch.int32, device=slots.device),
        seqlens_k,
        block_tables,
        1,
        width * layout.block_size,
        window,
        None,
        kernel,
    )


def write_rows_of(layout: KVLayout, slots: torch.Tensor) -> torch.Tensor:
    """int64 [num_layers, T] of `slots` [T], which count tokens of all blocks in turn."""
    slots = slots.long()
    blocks, offsets = slots // layout.block_size, slots % layout.block_size
    layers = torch.arange(layout.num_layers, device=slots.device)[:, None]
    return (blocks * layout.num_layers + layers) * layout.block_size + offsets


class PagedAttention:
    """The `AttentionBackend` around a kernel."""

    def __init__(self, kernel: PagedKernel, device: torch.device) -> None:
        self.kernel = kernel
        self.device = device

    def plan(
        self,
        layout: KVLayout,
        *,
        slot_mapping: Int32Array,
        seqlens_q: Int32Array,
        seqlens_k: Int32Array,
        block_tables: Int32Array,
        sliding_window: int | None = None,
    ) -> PagedStep:
        cu_seqlens = np.concatenate(([0], np.cumsum(seqlens_q))).astype(np.int32)
        width = -(-int(seqlens_k.max()) // layout.block_size)
        is_decode = bool((seqlens_q == 1).all())
        return PagedStep(
            write_rows_of(layout, self._on_device(slot_mapping)),
            self._on_device(cu_seqlens),
            self._on_device(seqlens_k),
            self._on_device(block_tables[:, :width]),
            int(seqlens_q.max()),
            int(seqlens_k.max()),
            sliding_window,
            None if is_decode else HostLengths(seqlens_q.tolist(), seqlens_k.tolist()),
            self.kernel,
        )

    def _on_device(self, array: Int32Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(self.device)
