"""The attention that transformers models are injected with: keys and masks come from the running cache."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from engine.hf.cache import PagedCache, running_cache

PAGED_ATTENTION = "tandem_paged"
"""Name under which transformers finds it. It makes no masks for a name it does not know."""


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """query [B, heads, T, D], key and value [B, kv_heads, K, ...] -> [B, T, heads, D of values].

    `s_aux` [heads]: logits of a sink that takes its share of each softmax and gives nothing.
    """
    layer = module.layer_idx
    assert isinstance(layer, int)
    cache = running_cache.get()
    assert isinstance(cache, PagedCache)
    mask = cache.mask(layer)
    if softcap is None and s_aux is None:
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None and query.shape[2] > 1,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    else:
        output = _explicit(query, key, value, mask, scaling, softcap, s_aux)
    return output.transpose(1, 2).contiguous(), None


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with what torch's own has no argument for."""
    num_heads, num_queries, num_keys = query.shape[1], query.shape[2], key.shape[2]
    grouped = query.reshape(len(query), key.shape[1], -1, *query.shape[2:])
    scores = grouped @ key.unsqueeze(2).transpose(-1, -2)
    scores = scores.flatten(1, 2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        mask = torch.full((num_queries, num_keys), -torch.inf).triu(1)
    scores = scores + mask
    if sinks is not None:
        shape = (len(query), num_heads, num_queries, 1)
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(shape)), dim=-1)
    weights = scores.softmax(-1)[..., :num_keys].reshape(*grouped.shape[:4], num_keys)
    return (weights @ value.unsqueeze(2)).flatten(1, 2)


AttentionInterface.register(PAGED_ATTENTION, paged_attention)
