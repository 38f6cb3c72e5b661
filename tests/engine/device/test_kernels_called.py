"""What the kernels that need a GPU are called with, by stand-ins that compute the same in plain torch."""

import numpy as np
import pytest
import torch

from engine.kv_pool import KVLayout, KVPool
from engine.model.attention_flashinfer import FlashInferKernel
from engine.model.attention_gather import GatherKernel
from engine.model.attention_varlen import VarlenKernel, paged_varlen
from engine.model.paged import PagedAttention, PagedKernel

CPU = torch.device("cpu")
LAYOUT = KVLayout(num_layers=2, block_size=4, num_kv_heads=2, head_dim=8)
NUM_HEADS = 6
SEQLENS_Q, SEQLENS_K = [3, 1, 5], [9, 6, 5]
TABLES = np.array([[3, 5, 1], [2, 8, 0], [7, 4, 0]], np.int32)


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None
) -> torch.Tensor:
    """The definition, for one sequence: [Q, heads, D] over [K, kv_heads, D]."""
    groups = queries.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(groups, dim=1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * queries.shape[-1] ** -0.5
    at = torch.arange(len(keys) - len(queries), len(keys))[:, None]
    places = torch.arange(len(keys))
    seen = places <= at
    if window is not None:
        seen &= places > at - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)


def varlen(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: None,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    num_splits: int,
) -> torch.Tensor:
    """As documented: pages [pages, page_size, kv_heads, D]; a window of (W, 0) shows W tokens before one."""
    assert (max_q, max_k, cu_seq_k, enable_gqa, num_splits) == (5, 9, None, True, 1)
    window = None if window_size == (-1, 0) else window_size[0] + 1
    parts = []
    for index, length in enumerate(seqused_k.tolist()):
        k, v = (pages[block_table[index].long()].flatten(0, 1)[:length] for pages in (keys, values))
        parts.append(attend(queries[cu_seq_q[index] : cu_seq_q[index + 1]], k, v, window))
    return torch.cat(parts)


class PagedWrapper:
    """As flashinfer documents its paged prefill wrapper."""

    def __init__(self) -> None:
        self.num_plans = 0

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        causal: bool,
        window_left: int,
        q_data_type: torch.dtype,
    ) -> None:
        assert (num_heads, num_kv_heads, head_dim, page_size, causal) == (NUM_HEADS, 2, 8, 4, True)
        self.num_plans += 1
        self._parts = (qo_indptr, kv_indptr, kv_indices, last_page_len, page_size)
        self._window = None if window_left < 0 else window_left + 1

    def run(self, queries: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        queries_at, pages_at, indices, last_lengths, page_size = self._parts
        parts = []
        for index, last in enumerate(last_lengths.tolist()):
            ids = indices[pages_at[index] : pages_at[index + 1]].long()
            length = (len(ids) - 1) * page_size + last
            k, v = (each[ids].flatten(0, 1)[:length] for each in pages)
            span = slice(int(queries_at[index]), int(queries_at[index + 1]))
            parts.append(attend(queries[span], k, v, self._window))
        return torch.cat(parts)


def run(kernel: PagedKernel, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Two layers of a step of three sequences; returns what was attended and the pool."""
    torch.manual_seed(3)
    pool = KVPool(LAYOUT, 10)
    pool.tensor.normal_()
    places = [
        (i, p) for i, (q, k) in enumerate(zip(SEQLENS_Q, SEQLENS_K, strict=True)) for p in range(k - q, k)
    ]
    step = PagedAttention(kernel, CPU).plan(
        LAYOUT,
        slot_mapping=np.array([TABLES[i, p // 4] * 4 + p % 4 for i, p in places], np.int32),
        seqlens_q=np.array(SEQLENS_Q, np.int32),
        seqlens_k=np.array(SEQLENS_K, np.int32),
        block_tables=TABLES,
        sliding_window=window,
    )
    qkv = torch.randn(2, sum(SEQLENS_Q), (NUM_HEADS + 4) * 8)
    attended = [step.attend(pool, layer, qkv[layer], NUM_HEADS) for layer in range(2)]
    return torch.stack(attended), pool.tensor


@pytest.mark.parametrize("window", [None, 4])
def test_all_kernels_are_asked_for_the_same(window: int | None) -> None:
    wrapper = PagedWrapper()
    expected, pool = run(GatherKernel(), window)
    for kernel in (VarlenKernel(varlen), FlashInferKernel(wrapper)):
        attended, same_pool = run(kernel, window)
        torch.testing.assert_close(attended, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(same_pool, pool)
    assert wrapper.num_plans == 1, "a step is planned once for all layers"


def test_without_flash_attention_3_the_reason_is_told() -> None:
    reason = paged_varlen()
    assert isinstance(reason, str)
    assert "FlashAttention 3 cannot be activated" in reason or "block table" in reason
