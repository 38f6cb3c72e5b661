"""The paged kernel of torch's own operations: gathers a sequence's blocks, then scaled dot product attention.

The reference for the other kernels, on every device, and the one that needs no further package.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from engine.kv_pool import KVPool
from engine.model.paged import PagedStep


class GatherKernel:
    block_multiple = 1

    def __call__(self, step: PagedStep, pool: KVPool, layer: int, queries: torch.Tensor) -> torch.Tensor:
        if step.host is None:
            return _attend_one_each(step, pool, layer, queries)
        output = torch.empty_like(queries)
        start = 0
        for index, (num_queries, num_keys) in enumerate(
            zip(step.host.seqlens_q, step.host.seqlens_k, strict=True)
        ):
            span = slice(start, start + num_queries)
            keys, values = _gathered(pool, layer, step.block_tables[index : index + 1])
            output[span] = _attend(queries[span], keys[0, :num_keys], values[0, :num_keys], step.window)
            start += num_queries
        return output


def _gathered(pool: KVPool, layer: int, block_tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [N, W * block_size, kv_heads, D] of the blocks in `block_tables` [N, W]."""
    layout = pool.layout
    rows = (block_tables * layout.num_layers + layer).reshape(-1)
    kv = pool.layer_rows.index_select(0, rows)
    shape = (len(block_tables), -1, 2, layout.num_kv_heads, layout.head_dim)
    keys, values = kv.view(shape).unbind(2)
    return keys, values


def _attend_one_each(step: PagedStep, pool: KVPool, layer: int, queries: torch.Tensor) -> torch.Tensor:
    """Query heads of one KV head stand as its query rows, so that nothing is repeated."""
    keys, values = _gathered(pool, layer, step.block_tables)
    num_sequences, num_keys, num_kv_heads, head_dim = keys.shape
    places = torch.arange(num_keys, device=keys.device)
    lengths = step.seqlens_k[:, None]
    seen = places < lengths
    if step.window is not None:
        seen &= places >= lengths - step.window
    output = F.scaled_dot_product_attention(
        queries.view(num_sequences, num_kv_heads, -1, head_dim),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=seen[:, None, None, :],
    )
    return output.reshape(num_sequences, -1, head_dim)


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None
) -> torch.Tensor:
    """One sequence: [Q, heads, D] over [K, kv_heads, D]; its last query sees all of the keys."""
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (queries, keys, values))
    num_queries, num_keys = len(queries), len(keys)
    if window is not None and num_keys > window:
        at = torch.arange(num_keys - num_queries, num_keys, device=q.device)[:, None]
        places = torch.arange(num_keys, device=q.device)
        mask = (places <= at) & (places > at - window)
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    elif num_queries == num_keys:
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:
        bias = causal_lower_right(num_queries, num_keys)
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
    return output[0].transpose(0, 1)
