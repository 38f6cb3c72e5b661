"""Runs a model of the Llama family on scheduled batches: one call of the kernels per step."""

import ctypes
from collections.abc import Callable

import numpy as np
import torch

from engine.kv_pool import KVPool
from engine.model.linear import Linear
from engine.model.llama import LlamaLayer, LlamaWeights
from engine.model_runner import IntArray, ModelBatch
from engine.native.library import CLayer, CLinear, CModel, CShape, CStep, Runtime
from engine.native.linear import NativeLinear
from engine.state_pool import StatePool
from model_files import ModelConfig

Address = Callable[[torch.Tensor], int]


class NativeRunner:
    """The runner whose forward pass is compiled. It reads the scheduler's arrays where they are."""

    kernels = "native"

    def __init__(self, runtime: Runtime, config: ModelConfig, weights: LlamaWeights, kv_pool: KVPool) -> None:
        """All linear layers of `weights` are `NativeLinear`."""
        self.config = config
        self.kv_pool = kv_pool
        self.kv_shards: tuple[KVPool, ...] = (kv_pool,)
        self.states: StatePool | None = None
        self.sliding_window = config.sliding_window
        self._runtime = runtime
        self._weights = weights  # the kernels keep addresses only
        self._layers = (CLayer * config.num_layers)(*map(_c_layer, weights.layers))
        self._model = _c_model(config, weights, kv_pool.layout.block_size, self._layers)

    def forward(self, batch: ModelBatch, logit_rows: IntArray | None = None) -> torch.Tensor:
        """Logits float32 [R, vocab] of these of the T tokens; keys and values of all go to the pool.

        `logit_rows` [R], ascending; None: each sequence's last token.
        """
        if logit_rows is None:
            logit_rows = np.cumsum(batch.seqlens_q) - 1
        rows = np.ascontiguousarray(logit_rows, np.int64)
        arrays = (
            batch.token_ids,
            batch.positions,
            batch.slot_mapping,
            batch.seqlens_q,
            batch.seqlens_k,
            batch.block_tables,
        )
        assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in arrays)
        assert batch.positions.max(initial=0) < self._model.num_positions
        logits = torch.empty(rows.size, self.config.vocab_size)
        step = CStep(
            batch.token_ids.size,
            batch.seqlens_q.size,
            rows.size,
            batch.block_tables.shape[1],
            *(array.ctypes.data for array in arrays),
            rows.ctypes.data,
            self.kv_pool.address,
            logits.data_ptr(),
        )
        self._runtime.library.forward(
            self._runtime.handle, ctypes.addressof(self._model), ctypes.addressof(step)
        )
        return logits


def _c_layer(layer: LlamaLayer) -> CLayer:
    return CLayer(
        layer.input_norm.data_ptr(),
        None if layer.qk_norm is None else layer.qk_norm.data_ptr(),
        layer.mlp_norm.data_ptr(),
        _c_linear(layer.qkv),
        _c_linear(layer.output),
        _c_linear(layer.gate_up),
        _c_linear(layer.down),
    )


def _c_linear(linear: Linear) -> CLinear:
    assert isinstance(linear, NativeLinear)
    return linear.c


def _c_model(
    config: ModelConfig, weights: LlamaWeights, block_size: int, layers: "ctypes.Array[CLayer]"
) -> CModel:
    shape = CShape(
        config.num_layers,
        config.hidden_size,
        config.intermediate_size,
        config.vocab_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        block_size,
        config.sliding_window or 0,
        config.rms_norm_eps,
    )
    return CModel(
        shape,
        len(weights.rotations),
        weights.embedding.data_ptr(),
        weights.rotations.data_ptr(),
        weights.final_norm.data_ptr(),
        ctypes.addressof(layers),
        _c_linear(weights.head),
    )
