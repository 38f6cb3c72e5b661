"""What a model keeps for a sequence, layer by layer, learned from one pass with transformers' own cache."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, get_layer_types_and_kwargs

from engine.errors import ModelNotSupportedError
from engine.hf.deepseek_v4 import V4Shape, is_deepseek_v4, v4_shape
from engine.kv_pool import KVLayout
from engine.state_pool import StateLayout

_LAYER_TYPES = frozenset(
    {"full_attention", "sliding_attention", "conv", "linear_attention", "hybrid", "hybrid_sliding", "dummy"}
)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Where one layer keeps what it keeps."""

    pool_layer: int | None = None
    """Its place among the layers of the KV pool; None: it does not attend."""
    window: int | None = None
    conv: Mapping[int, int] = field(default_factory=dict)
    recurrent: Mapping[int, int] = field(default_factory=dict)
    """Index of a state in the layer → its place in `StateLayout`."""
    num_states: int = 0


@dataclass(frozen=True, slots=True)
class CacheShape:
    layers: tuple[LayerShape, ...]
    kv: KVLayout
    states: StateLayout | None
    """None: the model keeps nothing but keys and values."""
    v4: V4Shape | None = None
    """Of DeepSeek-V4, whose layers keep what no other model's do."""

    def with_block_size(self, block_size: int) -> "CacheShape":
        return replace(self, kv=replace(self.kv, block_size=block_size))

    @property
    def windows(self) -> frozenset[int | None]:
        windows = frozenset(layer.window for layer in self.layers if layer.pool_layer is not None)
        return windows or frozenset({None})

    @property
    def common_window(self) -> int | None:
        """What no layer sees more than; None if one sees everything."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if len(windows) == len(self.windows) else None


def check_layer_types(config: PreTrainedConfig) -> None:
    """`ModelNotSupportedError` names a kind of layer whose cache the engine cannot own."""
    decoder = config.get_text_config(decoder=True)
    if is_deepseek_v4(decoder):
        return
    unknown = sorted(set(get_layer_types_and_kwargs(decoder)[0]) - _LAYER_TYPES)
    if unknown:
        raise ModelNotSupportedError(
            f"its layers of type {', '.join(unknown)} keep a cache of their own form"
        )
    if getattr(decoder, "kv_sharing_modes", None):
        raise ModelNotSupportedError("its layers share keys and values with each other")


def read_shape(config: PreTrainedConfig, cache: DynamicCache, block_size: int) -> CacheShape:
    """`cache` has been through a forward pass of one sequence."""
    decoder = config.get_text_config(decoder=True)
    if is_deepseek_v4(decoder):
        v4 = v4_shape(decoder, block_size)
        return CacheShape((), v4.kv, v4.states, v4)
    kv_shapes = [tuple(map(tuple, _kv_shape(layer))) for layer in cache.layers if _attends(layer)]
    if not kv_shapes:
        raise ModelNotSupportedError("none of its layers attends, so there are no KV blocks to serve it with")
    if len(set(kv_shapes)) > 1:
        raise ModelNotSupportedError("its layers have keys of different shapes")
    (num_heads, key_dim), (num_value_heads, value_dim) = kv_shapes[0]
    if num_heads != num_value_heads:
        raise ModelNotSupportedError(f"it has {num_heads} key heads but {num_value_heads} value heads")
    conv, recurrent = _states(cache, "conv_states"), _states(cache, "recurrent_states")
    places = {key: place for place, key in enumerate([*conv, *recurrent])}
    shapes = (*conv.values(), *recurrent.values())
    return CacheShape(
        layers=_layer_shapes(cache, places),
        kv=KVLayout(
            num_layers=len(kv_shapes),
            block_size=block_size,
            num_kv_heads=num_heads,
            head_dim=key_dim,
            value_head_dim=None if value_dim == key_dim else value_dim,
        ),
        states=StateLayout(shapes) if shapes else None,
    )


_StateKey = tuple[str, int, int]
"""Kind, layer, index in the layer."""


def _layer_shapes(cache: DynamicCache, places: Mapping[_StateKey, int]) -> tuple[LayerShape, ...]:
    shapes, pool_layer = [], 0
    for index, layer in enumerate(cache.layers):
        attends = _attends(layer)
        shapes.append(
            LayerShape(
                pool_layer=pool_layer if attends else None,
                window=getattr(layer, "sliding_window", None) if attends else None,
                conv=_places_of("conv_states", index, places),
                recurrent=_places_of("recurrent_states", index, places),
                num_states=getattr(layer, "number_of_states", 0),
            )
        )
        pool_layer += attends
    return tuple(shapes)


def _places_of(kind: str, layer: int, places: Mapping[_StateKey, int]) -> dict[int, int]:
    return {key[2]: place for key, place in places.items() if key[:2] == (kind, layer)}


def _states(cache: DynamicCache, kind: str) -> dict[_StateKey, tuple[int, ...]]:
    found: dict[_StateKey, tuple[int, ...]] = {}
    for index, layer in enumerate(cache.layers):
        states: Mapping[int, torch.Tensor | None] = getattr(layer, kind, {})
        for state_index, state in states.items():
            if state is None:
                continue
            if state.dtype != torch.float32:
                raise ModelNotSupportedError(f"it keeps a state of type {state.dtype}")
            found[kind, index, state_index] = tuple(state.shape[1:])
    return found


def _attends(layer: object) -> bool:
    return getattr(layer, "keys", None) is not None


def _kv_shape(layer: object) -> tuple[tuple[int, int], tuple[int, int]]:
    """(heads, width) of keys and of values."""
    keys: torch.Tensor = layer.keys  # type: ignore[attr-defined]
    values: torch.Tensor = layer.values  # type: ignore[attr-defined]
    return (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])
