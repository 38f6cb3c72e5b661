"""The cache object that a transformers model is given: its layers read and write the engine's pools.

1. begin    a part of a step is about to run: its sequences' state rows are at hand, as views or gathered
2. update   an attention layer's new keys and values go to the pool, those of the whole sequence come back;
            state layers change their rows in place
3. finish   gathered state rows go back to the pool
"""

from collections.abc import Sequence
from contextvars import ContextVar

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, LinearAttentionLayer

from engine.hf.deepseek_v4 import V4Cache
from engine.hf.parts import StepPart
from engine.hf.shapes import CacheShape, LayerShape
from engine.kv_pool import KVPool
from engine.state_pool import StatePool

running_cache: ContextVar["PagedCache | V4Cache"] = ContextVar("running_cache")
"""Of the forward pass that runs in this thread: attention functions find their masks there."""


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """Keys and values of one attention layer, in the paged pool."""

    is_sliding = False

    def __init__(self, pool: KVPool, shape: LayerShape) -> None:
        super().__init__()
        assert shape.pool_layer is not None
        self._pool = pool
        self._index = shape.pool_layer
        self._window = shape.window
        self._part: StepPart | None = None
        self.is_initialized = True

    def begin(self, part: StepPart) -> None:
        self._part = part

    @property
    def part(self) -> StepPart:
        assert self._part is not None, "no part of a step is running"
        return self._part

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [B, heads, T, D] and values to the pool; those of K tokens come back, heads as they came."""
        layout, part = self._pool.layout, self.part
        new = torch.cat((_token_rows(key_states), _token_rows(value_states)), dim=1)
        self._pool.token_rows.index_copy_(0, part.write_rows + self._index * layout.block_size, new)
        view = part.keys[self._window]
        if view.block_rows is None:
            return key_states, value_states
        stored = self._pool.layer_rows.index_select(0, view.block_rows + self._index)
        rows = stored.view(len(key_states), -1, layout.token_width)[:, : view.num_keys]
        keys, values = rows[..., : layout.key_width], rows[..., layout.key_width :]
        return _heads(keys, key_states.shape[1]), _heads(values, value_states.shape[1])

    def mask(self) -> torch.Tensor | None:
        return self.part.keys[self._window].mask

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def get_seq_length(self) -> int:
        return self.part.num_cached

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.part.num_cached + query_length, 0

    def get_max_length(self) -> int:
        return -1


class SlotLayer(LinearAttentionLayer):  # type: ignore[misc]
    """States of one layer: for each part, views of its sequences' rows."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(number_of_states=shape.num_states)
        self._shape = shape

    def begin_states(self, views: Sequence[torch.Tensor], *, is_start: bool) -> None:
        """`views`: every state of the model, [B, *shape]."""
        for index, at in self._shape.conv.items():
            self.conv_states[index] = views[at]
            self.conv_kernel_size[index] = views[at].shape[-1]
            self.is_conv_states_initialized[index] = True
        for index, at in self._shape.recurrent.items():
            self.recurrent_states[index] = views[at]
            self.is_recurrent_states_initialized[index] = True
        self.has_previous_state = dict.fromkeys(range(self._shape.num_states), not is_start)


class PagedSlotLayer(SlotLayer, PagedLayer):
    """A layer that attends and keeps a state beside."""

    def __init__(self, pool: KVPool, shape: LayerShape) -> None:
        PagedLayer.__init__(self, pool, shape)
        SlotLayer.__init__(self, shape)


class PagedCache(Cache):  # type: ignore[misc]
    """One for each model; runs one part at a time."""

    def __init__(self, shape: CacheShape, pool: KVPool, states: StatePool | None) -> None:
        super().__init__(layers=[_make_layer(layer, pool) for layer in shape.layers])
        self._states = states
        self._gathered: tuple[torch.Tensor, torch.Tensor] | None = None
        """Slots, and copies of their rows."""

    def begin(self, part: StepPart) -> None:
        views = self._take_states(part.slots)
        for layer in self.layers:
            if isinstance(layer, PagedLayer):
                layer.begin(part)
            if isinstance(layer, SlotLayer):
                layer.begin_states(views, is_start=part.is_start)

    def finish(self) -> None:
        if self._gathered is not None and self._states is not None:
            self._states.rows.index_copy_(0, *self._gathered)
        self._gathered = None

    def mask(self, layer: int) -> torch.Tensor | None:
        paged = self.layers[layer]
        assert isinstance(paged, PagedLayer), f"layer {layer} attends but has no keys of its own"
        return paged.mask()

    def _take_states(self, slots: tuple[int, ...]) -> list[torch.Tensor]:
        if self._states is None:
            return []
        first = slots[0]
        if slots == tuple(range(first, first + len(slots))):
            return self._states.layout.views(self._states.rows[first : first + len(slots)])
        index = torch.tensor(slots)
        rows = self._states.rows.index_select(0, index)
        self._gathered = index, rows
        return self._states.layout.views(rows)


def make_cache(shape: CacheShape, pool: KVPool, states: StatePool | None) -> PagedCache | V4Cache:
    """The cache object of a model."""
    if shape.v4 is None:
        return PagedCache(shape, pool, states)
    assert states is not None
    return V4Cache(shape.v4, pool, states)


def _make_layer(shape: LayerShape, pool: KVPool) -> CacheLayerMixin | SlotLayer | DummyLayer:
    if shape.pool_layer is None:
        return SlotLayer(shape) if shape.num_states else DummyLayer()
    return PagedSlotLayer(pool, shape) if shape.num_states else PagedLayer(pool, shape)


def _token_rows(states: torch.Tensor) -> torch.Tensor:
    """[B, heads, T, D] -> [B * T, heads * D]"""
    return states.transpose(1, 2).flatten(2).flatten(0, 1)


def _heads(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[B, K, heads * D] -> [B, heads, K, D], a view"""
    return rows.view(*rows.shape[:2], num_heads, -1).transpose(1, 2)
