"""The paged kernel of `torch.nn.attention.varlen`: flash attention that reads the pool by block tables.

Block tables came with torch 2.12, and torch's built-in flash attention (FA2) refuses them: they need FA3,
which torch takes from the package flash_attn_interface. `num_splits=1` keeps a sequence's result independent
of its neighbours.
"""

import inspect
from collections.abc import Callable

import torch

from engine.kv_pool import KVPool
from engine.model.paged import PagedStep

Varlen = Callable[..., "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"]
"""`torch.nn.attention.varlen.varlen_attn`."""


class VarlenKernel:
    block_multiple = 1

    def __init__(self, varlen_attn: Varlen) -> None:
        self._varlen_attn = varlen_attn

    def __call__(self, step: PagedStep, pool: KVPool, layer: int, queries: torch.Tensor) -> torch.Tensor:
        pages = pool.tensor[:, layer]
        output = self._varlen_attn(
            queries,
            pages[:, :, 0],
            pages[:, :, 1],
            step.cu_seqlens_q,
            None,
            step.max_seqlen_q,
            step.max_seqlen_k,
            window_size=(-1 if step.window is None else step.window - 1, 0),
            enable_gqa=True,
            seqused_k=step.seqlens_k,
            block_table=step.block_tables,
            num_splits=1,
        )
        assert isinstance(output, torch.Tensor), "no auxiliary results were asked for"
        return output


def paged_varlen() -> VarlenKernel | str:
    """The kernel, or why it cannot be had here."""
    try:
        from torch.nn.attention import activate_flash_attention_impl
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        return f"torch {torch.__version__} has no varlen attention ({error})"
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        return f"varlen attention of torch {torch.__version__} takes no block table; 2.12 does"
    try:
        activate_flash_attention_impl("FA3")
    except Exception as error:  # whatever a missing or unfit package makes it raise
        return f"FlashAttention 3 cannot be activated ({error})"
    return VarlenKernel(varlen_attn)
