"""DeepSeek-V4: a window of keys, compressed entries of what lies before it, and compressors half way.

Its own forward pass keeps growing lists for one sequence, so sequences run one by one, each with its lists
put together from the pools before the pass and taken apart after it:

- KV pool, a row for each layer and token: the token's key (which is its value, too), and behind it the
  compressed entry and the indexer's entry that this token has completed, if it has;
- state pool: tokens that wait for their compressor's window to fill, and what it reads of the window before.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache, DeepseekV4HCACache

from engine.hf.parts import StepPart
from engine.kv_pool import KVLayout, KVPool
from engine.state_pool import StateLayout, StatePool

LAYER_TYPES = frozenset({"sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"})


@dataclass(frozen=True, slots=True)
class Compressor:
    """One of a layer's compressors: where its entries and its states lie."""

    name: str
    entry: slice
    """Of a row of the KV pool."""
    buffers: tuple[int, int]
    """Places of kv and gate of the tokens that wait, in `StateLayout`."""
    overlaps: tuple[int, int] | None
    """The same of the window before; None: its windows do not overlap."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    kind: str
    rate: int
    """Tokens that become one entry; 0 without compressors."""
    compressors: tuple[Compressor, ...] = ()


@dataclass(frozen=True, slots=True)
class V4Shape:
    layers: tuple[LayerPlan, ...]
    config: PreTrainedConfig
    kv: KVLayout
    states: StateLayout


def is_deepseek_v4(config: PreTrainedConfig) -> bool:
    return bool(config.model_type == "deepseek_v4")


def v4_shape(config: PreTrainedConfig, block_size: int) -> V4Shape:
    shapes: list[tuple[int, ...]] = []
    layers = tuple(_plan(config, kind, shapes) for kind in config.layer_types)
    width = config.head_dim + config.index_head_dim
    kv = KVLayout(len(layers), block_size, num_kv_heads=1, head_dim=config.head_dim, value_head_dim=width)
    return V4Shape(layers, config, kv, StateLayout(tuple(shapes)))


def _plan(config: PreTrainedConfig, kind: str, shapes: list[tuple[int, ...]]) -> LayerPlan:
    """Adds the layer's states to `shapes`."""
    if kind == "sliding_attention":
        return LayerPlan(kind, 0)
    rate, head_dim = config.compress_rates[kind], config.head_dim
    if kind == "heavily_compressed_attention":
        entry = slice(head_dim, 2 * head_dim)
        buffers = _add(shapes, (rate - 1, head_dim))
        return LayerPlan(kind, rate, (Compressor("compressor", entry, buffers, None),))
    compressors, start = [], head_dim
    for name, width in (("compressor", head_dim), ("indexer", config.index_head_dim)):
        entry = slice(start, start + width)
        buffers, overlaps = _add(shapes, (rate - 1, 2 * width)), _add(shapes, (rate, width))
        compressors.append(Compressor(name, entry, buffers, overlaps))
        start += width
    return LayerPlan(kind, rate, tuple(compressors))


def _add(shapes: list[tuple[int, ...]], shape: tuple[int, ...]) -> tuple[int, int]:
    shapes += [shape, shape]
    return len(shapes) - 2, len(shapes) - 1


class _NewKeys:
    """Keeps the keys of a pass, which the layer itself may drop at once."""

    new_keys: torch.Tensor

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.new_keys = key_states
        updated: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states)  # type: ignore[misc]
        return updated


class _WindowLayer(_NewKeys, DynamicSlidingWindowLayer):  # type: ignore[misc]
    _layer_type = None


class _HeavyLayer(_NewKeys, DeepseekV4HCACache):  # type: ignore[misc]
    _layer_type = None


class _SparseLayer(_NewKeys, DeepseekV4CSACache):  # type: ignore[misc]
    _layer_type = None


class V4Cache(Cache):  # type: ignore[misc]
    """The cache of one pass over one sequence."""

    def __init__(self, shape: V4Shape, pool: KVPool, states: StatePool) -> None:
        super().__init__(layers=[_make_layer(plan, shape.config) for plan in shape.layers])
        self._shape = shape
        self._pool = pool
        self._states = states
        self._part: StepPart | None = None

    def begin(self, part: StepPart) -> None:
        assert len(part.slots) == 1, "its sequences run one by one"
        self._part = part
        self.layers = [_make_layer(plan, self._shape.config) for plan in self._shape.layers]
        if part.is_start:
            return
        states = self._states.layout.views(self._states.rows[part.slots[0]][None])
        for index, (plan, layer) in enumerate(zip(self._shape.layers, self.layers, strict=True)):
            rows = self._stored_rows(part, index)
            keys = rows[-(layer.sliding_window - 1) :, : self._shape.config.head_dim]
            layer.lazy_initialization(keys[None, None], keys[None, None])
            layer.keys = layer.values = keys[None, None]
            layer.cumulative_length = part.num_cached
            for compressor in plan.compressors:
                _restore(layer, plan.rate, compressor, rows, states, part.num_cached)

    def finish(self) -> None:
        part = self._part
        assert part is not None
        states = self._states.layout.views(self._states.rows[part.slots[0]][None])
        for index, (plan, layer) in enumerate(zip(self._shape.layers, self.layers, strict=True)):
            rows = self._new_rows(layer)
            for compressor in plan.compressors:
                _take_entries(layer, plan.rate, compressor, rows, part.num_cached)
                _take_states(layer, compressor, states)
            block_size = self._pool.layout.block_size
            self._pool.token_rows.index_copy_(0, part.write_rows + index * block_size, rows)

    def _stored_rows(self, part: StepPart, layer: int) -> torch.Tensor:
        """[num_cached, token_width]"""
        block_rows = part.keys[None].block_rows
        assert block_rows is not None
        rows = self._pool.layer_rows.index_select(0, block_rows + layer)
        return rows.view(-1, self._pool.layout.token_width)[: part.num_cached]

    def _new_rows(self, layer: _WindowLayer | _HeavyLayer | _SparseLayer) -> torch.Tensor:
        """[T, token_width] with the keys in them."""
        keys = layer.new_keys[0, 0]
        rows = keys.new_zeros(len(keys), self._pool.layout.token_width)
        rows[:, : keys.shape[1]] = keys
        return rows


def _make_layer(plan: LayerPlan, config: PreTrainedConfig) -> _WindowLayer | _HeavyLayer | _SparseLayer:
    if plan.kind == "sliding_attention":
        return _WindowLayer(sliding_window=config.sliding_window)
    return (_HeavyLayer if plan.kind == "heavily_compressed_attention" else _SparseLayer)(config)


def _restore(
    layer: _HeavyLayer | _SparseLayer,
    rate: int,
    compressor: Compressor,
    rows: torch.Tensor,
    states: list[torch.Tensor],
    num_cached: int,
) -> None:
    """What the layer held after `num_cached` tokens."""
    name, num_entries = compressor.name, num_cached // rate
    layer.entry_count[name] = num_entries
    if num_entries:
        layer.compressed_kv[name] = rows[rate - 1 :: rate, compressor.entry][None]
    kv, gate = (states[place][:, : num_cached % rate] for place in compressor.buffers)
    layer.buffer_kv[name], layer.buffer_gate[name] = kv.clone(), gate.clone()
    if compressor.overlaps is not None and num_entries:
        kv, gate = (states[place] for place in compressor.overlaps)
        layer.overlap_kv[name], layer.overlap_gate[name] = kv.clone(), gate.clone()


def _take_entries(
    layer: _HeavyLayer | _SparseLayer, rate: int, compressor: Compressor, rows: torch.Tensor, num_cached: int
) -> None:
    """Each new entry goes into the row of the token that completed it."""
    new = layer.compressed_kv[compressor.name][0, num_cached // rate :]
    first = rate - 1 - num_cached % rate
    rows[first::rate, compressor.entry] = new


def _take_states(
    layer: _HeavyLayer | _SparseLayer, compressor: Compressor, states: list[torch.Tensor]
) -> None:
    name = compressor.name
    for place, buffer in zip(compressor.buffers, (layer.buffer_kv, layer.buffer_gate), strict=True):
        states[place][:, : buffer[name].shape[1]] = buffer[name]
    if compressor.overlaps is not None and layer.overlap_kv[name] is not None:
        for place, overlap in zip(compressor.overlaps, (layer.overlap_kv, layer.overlap_gate), strict=True):
            states[place].copy_(overlap[name])
