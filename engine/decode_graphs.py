"""Decode steps captured once for each padded size and then replayed: one launch from the host for each.

A step of n sequences runs as the next larger size; the rows behind n are one token each at position 0 whose
keys go to the null block. Inputs reach the device in one copy of one buffer.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from engine.kv_pool import KVPool
from engine.model.interface import DecoderModel, Int32Array, StepInputs
from engine.model.paged import PagedKernel, decode_step

Run = Callable[[], torch.Tensor]


class Graphs(Protocol):
    """Captures what `run` launches."""

    def capture(self, run: Run) -> Run:
        """A function that does the same again, on the same tensors, and returns the same tensor."""
        ...


class CudaGraphs:
    """`torch.cuda.CUDAGraph`; all graphs share one pool of memory, as they never run at the same time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, run: Run) -> Run:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries allocate and choose kernels at the first run
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls can spoil a capture: transports make calls of their own meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run()
        self._pool = graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


class DecodeGraphs:
    """The decode steps of one model over one pool."""

    def __init__(
        self,
        model: DecoderModel,
        pool: KVPool,
        kernel: PagedKernel,
        graphs: Graphs,
        *,
        device: torch.device,
        max_num_seqs: int,
        max_width: int,
        window: int | None,
    ) -> None:
        """`max_width`: blocks of the longest sequence there can be."""
        self._model, self._pool, self._kernel, self._graphs = model, pool, kernel, graphs
        self._device = device
        self._max_num_seqs, self._max_width, self._window = max_num_seqs, max_width, window
        self._captured: dict[tuple[int, int], _Captured] = {}

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    def takes(self, num_sequences: int) -> bool:
        return num_sequences <= self._max_num_seqs

    def run(
        self, token_ids: Int32Array, slots: Int32Array, seqlens_k: Int32Array, block_tables: Int32Array
    ) -> torch.Tensor:
        """Logits float32 [n, vocab] of n sequences with one new token each; valid until the next call."""
        num_sequences = len(token_ids)
        width = -(-int(seqlens_k.max()) // self._pool.layout.block_size)
        size = padded(num_sequences, self._max_num_seqs), padded(width, self._max_width)
        captured = self._captured.get(size)
        if captured is None:
            captured = self._captured[size] = _Captured(self, *size)
        captured.fill(token_ids, slots, seqlens_k, block_tables[:, :width])
        return captured.replay()[:num_sequences]

    def forward(self, arrays: "_Arrays") -> torch.Tensor:
        step = decode_step(
            self._kernel,
            self._pool.layout,
            slots=arrays.slots,
            seqlens_k=arrays.seqlens_k,
            block_tables=arrays.block_tables,
            window=self._window,
        )
        rows = torch.arange(len(arrays.slots), device=self._device)
        inputs = StepInputs(arrays.token_ids, arrays.seqlens_k.long() - 1, rows, step)
        return self._model.forward(inputs, self._pool)

    def capture(self, run: Run) -> Run:
        return self._graphs.capture(run)

    def buffers(self, num_numbers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Host and device memory of as many int32; the host's is pinned where that is of use."""
        is_cuda = self._device.type == "cuda"
        host = torch.zeros(num_numbers, dtype=torch.int32, pin_memory=is_cuda)
        return host, torch.zeros(num_numbers, dtype=torch.int32, device=self._device)


class _Arrays:
    """The inputs of a padded step as parts of one int32 buffer."""

    def __init__(self, buffer: torch.Tensor, num_sequences: int, width: int) -> None:
        self.token_ids, self.slots, self.seqlens_k = buffer[: 3 * num_sequences].view(3, num_sequences)
        self.block_tables = buffer[3 * num_sequences :].view(num_sequences, width)


class _Captured:
    """One size; the buffers live as long as the graph that reads them."""

    def __init__(self, graphs: DecodeGraphs, num_sequences: int, width: int) -> None:
        self._host, self._device = graphs.buffers(num_sequences * (3 + width))
        self._filled = _Arrays(self._host, num_sequences, width)
        inputs = _Arrays(self._device, num_sequences, width)
        self._reset(0)
        self._device.copy_(self._host)
        self.replay = graphs.capture(lambda: graphs.forward(inputs))

    def fill(
        self, token_ids: Int32Array, slots: Int32Array, seqlens_k: Int32Array, block_tables: Int32Array
    ) -> None:
        count, width = block_tables.shape
        filled = self._filled
        for target, source in (
            (filled.token_ids, token_ids),
            (filled.slots, slots),
            (filled.seqlens_k, seqlens_k),
        ):
            target.numpy()[:count] = source
        filled.block_tables.numpy()[:count, :width] = block_tables
        filled.block_tables.numpy()[:count, width:] = 0
        self._reset(count)
        self._device.copy_(self._host, non_blocking=True)

    def _reset(self, first: int) -> None:
        """Rows from `first` on belong to nobody."""
        filled = self._filled
        filled.token_ids[first:] = 0
        filled.slots[first:] = 0
        filled.seqlens_k[first:] = 1
        filled.block_tables[first:] = 0


def padded(number: int, limit: int) -> int:
    """The next power of two, at most `limit`, which `number` does not exceed."""
    return min(limit, int(2 ** np.ceil(np.log2(max(1, number)))))
