"""Cuts a step into forward passes that transformers can run: one for all decodes, one for each prompt chunk.

Its convolution and linear-attention layers know no packed rows of several sequences, so decodes run as
[B, 1] and a chunk as [1, T].
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.kv_pool import KVLayout
from engine.model_runner import Int32Array, ModelBatch

Window = int | None
"""How many tokens each token sees, itself included; None: all before it."""


class StateBatch(ModelBatch, Protocol):
    """What a model with per-sequence states needs beside."""

    @property
    def state_slots(self) -> Int32Array: ...


@dataclass(frozen=True, slots=True)
class KeyView:
    """Which keys the B sequences of a part see in layers of one window: K for each."""

    block_rows: torch.Tensor | None
    """int64 [B * W]: rows of `KVPool.layer_rows` for layer 0; None: the chunk's own keys are all."""
    num_keys: int
    """K, at most W * block_size."""
    mask: torch.Tensor | None
    """float32 [B, 1, 1, K] or [T, K]: 0 or -inf; None means causal."""


@dataclass(frozen=True, slots=True)
class StepPart:
    """One forward pass: B sequences with T new tokens each; B or T is 1."""

    rows: npt.NDArray[np.int64]
    """[B * T], ascending: places of its tokens in the step."""
    token_ids: torch.Tensor
    positions: torch.Tensor
    """int64 [B, T]"""
    write_rows: torch.Tensor
    """int64 [B * T]: rows of `KVPool.token_rows` for layer 0."""
    keys: Mapping[Window, KeyView]
    slots: tuple[int, ...]
    """State slot of each sequence."""
    is_start: bool
    """Nothing of the sequence is computed yet: its state is not read."""
    num_cached: int
    """Tokens of the longest sequence that were computed before."""


def split_step(
    batch: StateBatch, layout: KVLayout, windows: Iterable[Window], *, one_by_one: bool = False
) -> list[StepPart]:
    """All parts of a step; `windows` are those that the model's layers have.

    `one_by_one`: no two sequences in one part, for models that cannot tell them apart.
    """
    is_decode = (batch.seqlens_q == 1) & (batch.seqlens_k > 1)
    cutter = _Cutter(batch, layout, tuple(windows))
    parts = [cutter.chunk(sequence) for sequence in np.flatnonzero(~is_decode).tolist()]
    decodes = np.flatnonzero(is_decode)
    if one_by_one:
        return parts + [cutter.decodes(decodes[at : at + 1]) for at in range(decodes.size)]
    return [*parts, cutter.decodes(decodes)] if decodes.size else parts


class _Cutter:
    def __init__(self, batch: StateBatch, layout: KVLayout, windows: tuple[Window, ...]) -> None:
        self._batch = batch
        self._layout = layout
        self._windows = windows
        self._starts = np.concatenate(([0], np.cumsum(batch.seqlens_q))).astype(np.int64)

    def chunk(self, sequence: int) -> StepPart:
        num_keys, num_queries = int(self._batch.seqlens_k[sequence]), int(self._batch.seqlens_q[sequence])
        return self._part(
            np.array([sequence]),
            np.arange(self._starts[sequence], self._starts[sequence + 1]),
            (1, num_queries),
            {window: self._chunk_keys(sequence, window) for window in self._windows},
            num_cached=num_keys - num_queries,
        )

    def decodes(self, sequences: npt.NDArray[np.int64]) -> StepPart:
        return self._part(
            sequences,
            self._starts[sequences],
            (sequences.size, 1),
            {window: self._decode_keys(sequences, window) for window in self._windows},
            num_cached=int(self._batch.seqlens_k[sequences].max()) - 1,
        )

    def _part(
        self,
        sequences: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64],
        shape: tuple[int, int],
        keys: Mapping[Window, KeyView],
        num_cached: int,
    ) -> StepPart:
        batch, layout = self._batch, self._layout
        blocks, offsets = np.divmod(batch.slot_mapping[rows].astype(np.int64), layout.block_size)
        write_rows = blocks * layout.num_layers * layout.block_size + offsets
        return StepPart(
            rows=rows,
            token_ids=torch.from_numpy(batch.token_ids[rows].astype(np.int64)).view(shape),
            positions=torch.from_numpy(batch.positions[rows].astype(np.int64)).view(shape),
            write_rows=torch.from_numpy(write_rows),
            keys=keys,
            slots=tuple(batch.state_slots[sequences].tolist()),
            is_start=num_cached == 0,
            num_cached=num_cached,
        )

    def _chunk_keys(self, sequence: int, window: Window) -> KeyView:
        num_keys, num_queries = int(self._batch.seqlens_k[sequence]), int(self._batch.seqlens_q[sequence])
        start, size = num_keys - num_queries, self._layout.block_size
        if start == 0 and (window is None or num_keys <= window):
            return KeyView(None, num_keys, None)
        first_block = 0 if window is None else max(0, start - window + 1) // size
        keys = np.arange(0 if start == 0 else first_block * size, num_keys)
        queries = np.arange(start, num_keys)[:, None]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        if start == 0:
            return KeyView(None, num_keys, _mask(hidden))
        table = self._batch.block_tables[sequence, first_block : -(-num_keys // size)]
        return KeyView(self._block_rows(table), keys.size, _mask(hidden))

    def _decode_keys(self, sequences: npt.NDArray[np.int64], window: Window) -> KeyView:
        size, lengths = self._layout.block_size, self._batch.seqlens_k[sequences].astype(np.int64)
        first = np.zeros_like(lengths) if window is None else np.maximum(0, lengths - window) // size
        num_blocks = -(-lengths // size) - first
        width = int(num_blocks.max())
        columns = first[:, None] + np.arange(width)
        is_inside = np.arange(width) < num_blocks[:, None]
        tables = self._batch.block_tables[sequences[:, None], np.where(is_inside, columns, 0)]
        keys = first[:, None] * size + np.arange(width * size)
        hidden = keys >= lengths[:, None]
        if window is not None:
            hidden |= keys < lengths[:, None] - window
        blocks = np.where(is_inside, tables, 0).ravel()
        return KeyView(self._block_rows(blocks), width * size, _mask(hidden)[:, None, None, :])

    def _block_rows(self, blocks: npt.NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(blocks.astype(np.int64) * self._layout.num_layers)


def _mask(hidden: npt.NDArray[np.bool_]) -> torch.Tensor:
    return torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0.0)))
