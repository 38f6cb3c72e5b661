"""Which part of a model one tensor-parallel rank holds.

Attention heads and hidden units are split by whole ranges; KV heads too, or each is held by several ranks
where there are more ranks than KV heads. The head is split by vocabulary, padded to equal parts.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from engine.errors import TensorParallelError
from engine.model.linear import Linear
from kv_transfer.errors import LayoutError
from kv_transfer.head_slices import heads_of
from model_files import ModelConfig

Q4_GROUP = 32
"""So many 4-bit weights of a row share a scale."""


class Collectives(Protocol):
    """What the ranks of one model do together; every rank makes the same calls in the same order."""

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        ...

    def gather(self, part: torch.Tensor) -> list[torch.Tensor] | None:
        """Every rank's `part`, at rank 0; None at the others. All are of one shape."""
        ...


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`; the whole model is rank 0 of 1."""

    rank: int = 0
    size: int = 1

    def part(self, total: int) -> slice:
        """Our equal part of `total`."""
        width = total // self.size
        return slice(self.rank * width, (self.rank + 1) * width)

    def kv_heads(self, num_kv_heads: int) -> range:
        return heads_of(self.rank, self.size, num_kv_heads)


WHOLE = Shard()


def check_shards(config: ModelConfig, size: int) -> None:
    """`TensorParallelError` unless every rank of `size` gets whole heads and an equal part of the rest."""
    for name in ("num_heads", "intermediate_size"):
        number = getattr(config, name)
        if number % size:
            raise TensorParallelError(
                f"--tp {size} does not divide {name} {number} of this model; "
                f"choose a divisor, one of {_divisors(config)}"
            )
    try:
        heads_of(0, size, config.num_kv_heads)
    except LayoutError as error:
        raise TensorParallelError(f"--tp {size}: {error}; choose one of {_divisors(config)}") from None


def check_q4_groups(config: ModelConfig, size: int) -> None:
    """`TensorParallelError` unless every rank's columns are whole groups of weights that share a scale."""
    for name, width in (
        ("num_heads * head_dim", config.num_heads * config.head_dim),
        ("intermediate_size", config.intermediate_size),
    ):
        if width // size % Q4_GROUP:
            raise TensorParallelError(
                f"--dtype q4 has groups of {Q4_GROUP} weights, and --tp {size} gives each rank "
                f"{width // size} of {name} {width}, which are no whole groups; "
                "choose another --tp, or --dtype fp16w"
            )


def _divisors(config: ModelConfig) -> str:
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.intermediate_size
    fitting = (n for n in range(1, heads + 1) if not heads % n and not width % n)
    return ", ".join(str(n) for n in fitting if not kv_heads % n or not n % kv_heads)


def local_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The model as one rank sees it."""
    if shard.size == 1:
        return config
    return replace(
        config,
        num_heads=config.num_heads // shard.size,
        num_kv_heads=len(shard.kv_heads(config.num_kv_heads)),
        intermediate_size=config.intermediate_size // shard.size,
    )


class SummedLinear:
    """A layer whose inputs are split: every rank's product is a term of the sum."""

    __slots__ = ("_collectives", "_part")

    def __init__(self, part: Linear, collectives: Collectives) -> None:
        self._part = part
        self._collectives = collectives

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._collectives.sum_(self._part(rows).contiguous())


class GatheredHead:
    """The head, split by vocabulary: rank 0 gets all logits, the others none."""

    __slots__ = ("_collectives", "_part", "_vocab_size")

    def __init__(self, part: Linear, vocab_size: int, collectives: Collectives) -> None:
        """`part`: of `vocab_size` rounded up to equal parts."""
        self._part = part
        self._vocab_size = vocab_size
        self._collectives = collectives

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        parts = self._collectives.gather(self._part(rows).contiguous())
        if parts is None:
            return rows.new_empty(len(rows), 0)
        return torch.cat(parts, dim=1)[:, : self._vocab_size]


def vocabulary_part(weight: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Our rows of the head's `weight` [vocab, hidden], zeros behind the last where parts would be unequal."""
    width = -(-len(weight) // shard.size)
    part = weight[shard.rank * width : (shard.rank + 1) * width]
    if len(part) == width:
        return part
    return torch.cat((part, weight.new_zeros(width - len(part), weight.shape[1])))
