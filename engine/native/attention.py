"""The kernels' attention for a forward pass that torch walks through: that of one rank of several."""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from engine.kv_pool import KVLayout, KVPool
from engine.model.interface import Int32Array
from engine.native.library import CShape, CStep, Runtime


@dataclass(frozen=True, slots=True)
class NativePlan:
    """One step. The arrays are kept because the kernels get their addresses."""

    runtime: Runtime
    write_rows: torch.Tensor
    """int64 [num_layers, T]: rows of `KVPool.token_rows`."""
    seqlens_q: Int32Array
    seqlens_k: Int32Array
    block_tables: Int32Array
    sliding_window: int | None

    def attend(self, pool: KVPool, layer: int, qkv: torch.Tensor, num_heads: int) -> torch.Tensor:
        """`StepAttention`."""
        layout, qkv = pool.layout, qkv.contiguous()
        pool.token_rows.index_copy_(0, self.write_rows[layer], qkv[:, num_heads * layout.head_dim :])
        shape = CShape(
            num_layers=layout.num_layers,
            num_heads=num_heads,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            block_size=layout.block_size,
            sliding_window=self.sliding_window or 0,
        )
        step = CStep(
            num_tokens=len(qkv),
            num_sequences=self.seqlens_q.size,
            table_width=self.block_tables.shape[1],
            seqlens_q=self.seqlens_q.ctypes.data,
            seqlens_k=self.seqlens_k.ctypes.data,
            block_tables=self.block_tables.ctypes.data,
            pool=pool.address,
        )
        output = torch.empty(len(qkv), num_heads * layout.head_dim)
        self.runtime.library.attend(
            self.runtime.handle,
            ctypes.addressof(shape),
            ctypes.addressof(step),
            layer,
            qkv.data_ptr(),
            output.data_ptr(),
        )
        return output


class NativeAttention:
    """`AttentionBackend` of the kernels."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def plan(
        self,
        layout: KVLayout,
        *,
        slot_mapping: Int32Array,
        seqlens_q: Int32Array,
        seqlens_k: Int32Array,
        block_tables: Int32Array,
        sliding_window: int | None = None,
    ) -> NativePlan:
        blocks, offsets = np.divmod(slot_mapping.astype(np.int64), layout.block_size)
        layers = np.arange(layout.num_layers, dtype=np.int64)[:, None]
        write_rows = (blocks * layout.num_layers + layers) * layout.block_size + offsets
        assert all(
            array.dtype == np.int32 and array.flags.c_contiguous
            for array in (seqlens_q, seqlens_k, block_tables)
        )
        return NativePlan(
            self._runtime, torch.from_numpy(write_rows), seqlens_q, seqlens_k, block_tables, sliding_window
        )
