"""Attention over the paged KV pool: what a step reads and writes is planned once, then run per layer.

Sequences with one new token are gathered block by block and attended together, in groups of similar
length; sequences with more (prompt chunks) are attended one at a time, over their own new keys alone
when nothing came before, else over all of their blocks.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from engine.kv_pool import KVLayout, KVPool
from engine.model.interface import Int32Array

_GROUP_OVERHEAD_TOKENS = 512
"""A further group costs about as much as attending to this many padding tokens."""
_PADDING_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """n sequences with one new token each, padded to a common number of blocks W."""

    rows: torch.Tensor
    """int64 [n]: their rows in the step, ascending."""
    block_rows: torch.Tensor
    """int64 [num_layers, n * W]: rows of `KVPool.layer_rows`."""
    mask: torch.Tensor
    """float32 [n, 1, 1, W * block_size]: 0 or -inf."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Rows start..end of the step: consecutive tokens of one sequence, whose keys end with their own."""

    start: int
    end: int
    num_keys: int
    block_rows: torch.Tensor | None
    """int64 [num_layers, W]; None when the chunk is the sequence's beginning."""
    mask: torch.Tensor | None
    """float32 [end - start, num_keys]: 0 or -inf; None means causal."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where one step's keys and values go, and which of them each token sees."""

    write_rows: torch.Tensor
    """int64 [num_layers, T]: rows of `KVPool.token_rows`."""
    decodes: tuple[DecodeGroup, ...]
    chunks: tuple[PromptChunk, ...]

    @property
    def is_one_part(self) -> bool:
        """One group or one chunk is the whole step, row by row."""
        return len(self.decodes) + len(self.chunks) == 1

    def attend(self, pool: KVPool, layer: int, qkv: torch.Tensor, num_heads: int) -> torch.Tensor:
        """`StepAttention`."""
        return attend(self, pool, layer, qkv, num_heads)


class TorchAttention:
    """The `AttentionBackend` of torch's own operations, for every processor."""

    def plan(
        self,
        layout: KVLayout,
        *,
        slot_mapping: Int32Array,
        seqlens_q: Int32Array,
        seqlens_k: Int32Array,
        block_tables: Int32Array,
        sliding_window: int | None = None,
    ) -> AttentionPlan:
        return plan_attention(
            layout,
            slot_mapping=slot_mapping,
            seqlens_q=seqlens_q,
            seqlens_k=seqlens_k,
            block_tables=block_tables,
            sliding_window=sliding_window,
        )


def plan_attention(
    layout: KVLayout,
    *,
    slot_mapping: Int32Array,
    seqlens_q: Int32Array,
    seqlens_k: Int32Array,
    block_tables: Int32Array,
    sliding_window: int | None = None,
) -> AttentionPlan:
    """The plan of a step whose sequences' tokens lie one after the other, in sequence order."""
    blocks, offsets = np.divmod(slot_mapping.astype(np.int64), layout.block_size)
    layers = np.arange(layout.num_layers, dtype=np.int64)[:, None]
    write_rows = (blocks * layout.num_layers + layers) * layout.block_size + offsets
    starts = np.concatenate(([0], np.cumsum(seqlens_q)))
    planner = _Planner(layout, seqlens_k, block_tables, sliding_window)
    singles = np.flatnonzero(seqlens_q == 1)
    multiples = np.flatnonzero(seqlens_q > 1).tolist()
    chunks = [planner.chunk(i, int(starts[i]), int(starts[i + 1])) for i in multiples]
    decodes = [planner.decode_group(group, starts) for group in planner.groups(singles)]
    return AttentionPlan(torch.from_numpy(write_rows), tuple(decodes), tuple(chunks))


def attend(plan: AttentionPlan, pool: KVPool, layer: int, qkv: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Stores the new keys and values, then attends: qkv [T, (heads + 2 kv_heads) * D] -> [T, heads * D].

    `qkv` rows hold q, k, v of all heads in this order, already rotated.
    """
    head_dim = pool.layout.head_dim
    queries = qkv[:, : num_heads * head_dim]
    new_kv = qkv[:, num_heads * head_dim :]
    pool.token_rows.index_copy_(0, plan.write_rows[layer], new_kv)
    if plan.is_one_part and plan.decodes:
        return _attend_decodes(plan.decodes[0], pool, layer, queries)
    if plan.is_one_part:
        return _attend_chunk(plan.chunks[0], pool, layer, queries, new_kv)
    output = torch.empty_like(queries, memory_format=torch.contiguous_format)
    for group in plan.decodes:
        output[group.rows] = _attend_decodes(group, pool, layer, queries[group.rows])
    for chunk in plan.chunks:
        span = slice(chunk.start, chunk.end)
        output[span] = _attend_chunk(chunk, pool, layer, queries[span], new_kv[span])
    return output


def _attend_decodes(group: DecodeGroup, pool: KVPool, layer: int, queries: torch.Tensor) -> torch.Tensor:
    layout, n = pool.layout, len(queries)
    kv = pool.layer_rows.index_select(0, group.block_rows[layer])
    keys, values = kv.view(n, -1, 2, layout.num_kv_heads, layout.head_dim).transpose(1, 3).unbind(2)
    heads = queries.view(n, -1, 1, layout.head_dim)
    output = F.scaled_dot_product_attention(heads, keys, values, attn_mask=group.mask, enable_gqa=True)
    return output.view(n, -1)


def _attend_chunk(
    chunk: PromptChunk, pool: KVPool, layer: int, queries: torch.Tensor, new_kv: torch.Tensor
) -> torch.Tensor:
    layout = pool.layout
    if chunk.block_rows is None:
        kv = new_kv
    else:
        kv = pool.layer_rows.index_select(0, chunk.block_rows[layer]).view(-1, pool.token_rows.shape[1])
    kv = kv[: chunk.num_keys].view(1, chunk.num_keys, 2, layout.num_kv_heads, layout.head_dim)
    keys, values = kv.transpose(1, 3).unbind(2)
    heads = queries.view(1, len(queries), -1, layout.head_dim).transpose(1, 2)
    output = F.scaled_dot_product_attention(
        heads, keys, values, attn_mask=chunk.mask, is_causal=chunk.mask is None, enable_gqa=True
    )
    return output.transpose(1, 2).reshape(len(queries), -1)


class _Planner:
    """Turns lengths and block tables into groups, chunks, gather rows and masks."""

    def __init__(
        self, layout: KVLayout, seqlens_k: Int32Array, block_tables: Int32Array, window: int | None
    ) -> None:
        self._layout = layout
        self._seqlens_k = seqlens_k
        self._block_tables = block_tables
        self._window = window
        self._num_blocks = -(-seqlens_k // layout.block_size)

    def groups(self, sequences: npt.NDArray[np.intp]) -> list[list[int]]:
        """Sequences by falling length, a new group wherever padding would cost more than the group."""
        ordered = sequences[np.argsort(-self._num_blocks[sequences], kind="stable")].tolist()
        groups: list[list[int]] = []
        padding = real = 0
        for sequence in ordered:
            num_blocks = int(self._num_blocks[sequence])
            padding += (int(self._num_blocks[groups[-1][0]]) - num_blocks) if groups else 0
            real += num_blocks
            allowed = max(_GROUP_OVERHEAD_TOKENS // self._layout.block_size, _PADDING_SHARE * real)
            if groups and padding <= allowed:
                groups[-1].append(sequence)
            else:
                groups.append([sequence])
                padding, real = 0, num_blocks
        return [sorted(group) for group in groups]

    def decode_group(self, group: list[int], starts: npt.NDArray[np.int64]) -> DecodeGroup:
        width = int(self._num_blocks[group].max())
        lengths = self._seqlens_k[group, None]
        keys = np.arange(width * self._layout.block_size)
        hidden = keys >= lengths
        if self._window is not None:
            hidden |= keys < lengths - self._window
        block_rows = self._gather_rows(self._block_tables[group, :width].ravel())
        return DecodeGroup(torch.from_numpy(starts[group]), block_rows, _mask(hidden)[:, None, None, :])

    def chunk(self, sequence: int, start: int, end: int) -> PromptChunk:
        num_keys, num_queries = int(self._seqlens_k[sequence]), end - start
        fits_window = self._window is None or num_keys <= self._window
        if num_keys == num_queries and fits_window:
            return PromptChunk(start, end, num_keys, None, None)
        keys = np.arange(num_keys)
        queries = np.arange(num_keys - num_queries, num_keys)[:, None]
        hidden = keys > queries
        if self._window is not None:
            hidden |= keys <= queries - self._window
        table = self._block_tables[sequence, : self._num_blocks[sequence]]
        return PromptChunk(start, end, num_keys, self._gather_rows(table), _mask(hidden))

    def _gather_rows(self, blocks: Int32Array) -> torch.Tensor:
        layers = np.arange(self._layout.num_layers, dtype=np.int64)[:, None]
        return torch.from_numpy(blocks.astype(np.int64) * self._layout.num_layers + layers)


def _mask(hidden: npt.NDArray[np.bool_]) -> torch.Tensor:
    return torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0.0)))
