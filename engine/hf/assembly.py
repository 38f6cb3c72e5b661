"""Makes a runner for a model that only transformers computes, or says in one line why not."""

import logging
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from engine.errors import ModelNotSupportedError
from engine.hf.attention import PAGED_ATTENTION
from engine.hf.loading import load_transformers_model
from engine.hf.runner import TransformersRunner
from engine.hf.shapes import CacheShape, check_layer_types, read_shape
from engine.kv_pool import KVPool
from engine.model.linear import WeightFormat
from engine.model_runner import Int32Array, PoolSizes
from engine.state_pool import StateLayout, StatePool
from model_files import ModelConfig, ModelFiles

logger = logging.getLogger(__name__)

_TRIAL_LENGTH = 12
_TRIAL_CHUNKS = ((0, 5), (5, 11))
"""Then the last token, as a decode of two sequences alike."""
_TRIAL_BLOCK_SIZE = 4
_TRIAL_BLOCKS = _TRIAL_LENGTH // _TRIAL_BLOCK_SIZE
_TOLERANCE = 1e-3
"""Of the largest logit. Different summing gives 1e-6, a mask or a state left out 0.1 and more."""


@dataclass(frozen=True, slots=True)
class InjectedModel:
    """A model that has been tried with the engine's attention and cache; many runners may share it."""

    model: PreTrainedModel
    config: ModelConfig
    shape: CacheShape

    def runner(self, kv_pool: KVPool, states: StatePool | None) -> TransformersRunner:
        return TransformersRunner(self.model, self.config, self.shape, kv_pool, states)


def load_transformers_runner(
    files: ModelFiles, weight_format: WeightFormat, block_size: int, sizes: PoolSizes
) -> TransformersRunner:
    """`ModelNotSupportedError` unless the model, so injected, gives the logits that it gives by itself."""
    injected = inject(files, weight_format, block_size)
    kv, states = injected.shape.kv, injected.shape.states
    logger.info("%s is computed by transformers: KV %s, states %s", files.name, kv, states or "none")
    return injected.runner(
        KVPool.of_bytes(kv, sizes.kv_bytes), None if states is None else make_state_pool(states, sizes)
    )


def inject(files: ModelFiles, weight_format: WeightFormat, block_size: int) -> InjectedModel:
    """Load, learn what it keeps for a sequence, and compare it with itself. `ModelNotSupportedError`."""
    config = files.config()
    try:
        model = load_transformers_model(files, weight_format)
        check_layer_types(model.config)
        shape, expected = _measure(model, config, block_size)
        injected = InjectedModel(model, config, shape)
        _check(injected, expected)
    except ModelNotSupportedError as error:
        raise ModelNotSupportedError(
            f"{files.name}: {_architecture(files)} cannot be served: {error}"
        ) from error
    return injected


def make_state_pool(layout: StateLayout, sizes: PoolSizes) -> StatePool:
    """As many slots as fit `state_bytes`, the null slot included.

    None: two for each of `max_num_seqs` sequences, as some wait for their reader or are kept for a later
    prompt, but not more memory than the KV pool may take.
    """
    if sizes.state_bytes is not None:
        return StatePool(layout, sizes.state_bytes // layout.row_bytes)
    wanted = 2 * sizes.max_num_seqs + 1
    return StatePool(layout, max(2, min(wanted, sizes.kv_bytes // layout.row_bytes)))


@torch.inference_mode()
def _measure(model: PreTrainedModel, config: ModelConfig, block_size: int) -> tuple[CacheShape, torch.Tensor]:
    """What a sequence keeps, and the logits [vocab] after the trial tokens, with transformers' own cache."""
    cache = DynamicCache(config=model.config)
    try:
        model.set_attn_implementation("eager")
        output = model(
            input_ids=torch.from_numpy(_trial_tokens(config).astype(np.int64))[None],
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
    except Exception as error:  # whatever a model's own code raises
        raise ModelNotSupportedError(f"its forward pass fails ({type(error).__name__}: {error})") from error
    return read_shape(model.config, cache, block_size), output.logits[0, -1]


def _check(injected: InjectedModel, expected: torch.Tensor) -> None:
    """In chunks and a decode through small pools, compared with the pass over all at once."""
    if not type(injected.model)._can_set_attn_implementation():
        raise ModelNotSupportedError("its attention cannot be replaced")
    try:
        if injected.shape.v4 is None:
            injected.model.set_attn_implementation(PAGED_ATTENTION)
        results = _run_trial(injected)
    except Exception as error:  # whatever a model's own code raises
        reason = f"it fails with the engine's attention and cache ({type(error).__name__}: {error})"
        raise ModelNotSupportedError(reason) from error
    difference = float((results - expected).abs().max() / expected.abs().max())
    if not difference <= _TOLERANCE:
        raise ModelNotSupportedError(
            f"with the engine's attention and cache its logits differ by {difference:.1e} of the largest"
        )


def _run_trial(injected: InjectedModel) -> torch.Tensor:
    """Logits [2, vocab] of two sequences alike; the second begins as a copy of the first."""
    shape, tokens = injected.shape, _trial_tokens(injected.config)
    small = shape.with_block_size(_TRIAL_BLOCK_SIZE)
    pool = KVPool(small.kv, 1 + 2 * _TRIAL_BLOCKS)
    states = None if shape.states is None else StatePool(shape.states, 4)
    runner = replace(injected, shape=small).runner(pool, states)
    for start, end in _TRIAL_CHUNKS:
        runner.forward(_trial_batch(tokens, start, end, num_sequences=1))
    for block in range(1, 1 + _TRIAL_BLOCKS):
        pool.copy_block(block, block + _TRIAL_BLOCKS)
    if states is not None:
        states.copy_slot(1, 3)
    return runner.forward(_trial_batch(tokens, _TRIAL_LENGTH - 1, _TRIAL_LENGTH, num_sequences=2))


def _trial_tokens(config: ModelConfig) -> Int32Array:
    return np.arange(1, 1 + _TRIAL_LENGTH, dtype=np.int32) * 7 % config.vocab_size


@dataclass(frozen=True, slots=True)
class TrialBatch:
    """A `StateBatch` by hand."""

    token_ids: Int32Array
    positions: Int32Array
    slot_mapping: Int32Array
    seqlens_q: Int32Array
    seqlens_k: Int32Array
    block_tables: Int32Array
    state_slots: Int32Array


def _trial_batch(tokens: Int32Array, start: int, end: int, num_sequences: int) -> TrialBatch:
    positions = np.arange(start, end, dtype=np.int32)
    blocks = np.arange(2 * _TRIAL_BLOCKS, dtype=np.int32).reshape(2, -1)[:num_sequences] + 1
    in_pool = blocks[:, positions // _TRIAL_BLOCK_SIZE] * _TRIAL_BLOCK_SIZE + positions % _TRIAL_BLOCK_SIZE
    return TrialBatch(
        token_ids=np.tile(tokens[start:end], num_sequences),
        positions=np.tile(positions, num_sequences),
        slot_mapping=in_pool.ravel(),
        seqlens_q=np.full(num_sequences, end - start, np.int32),
        seqlens_k=np.full(num_sequences, end, np.int32),
        block_tables=blocks,
        state_slots=np.array([1, 3][:num_sequences], np.int32),
    )


def _architecture(files: ModelFiles) -> str:
    names = files.source_config().get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "this model"
