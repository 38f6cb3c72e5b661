"""The one collective a group uses: every rank's row of integers, gathered by gloo in the host's memory.

Also where the model is on a GPU: the numbers are the scheduler's, and NCCL refuses ranks that share a GPU.
"""

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch.distributed import ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import Store

from shared_scheduler import GroupError

WAIT_SLICE_S = 0.5
CONNECT_TIMEOUT_S = 15.0
FOREVER = timedelta(days=365)
"""The backend's own time limit; ours is in `while_waiting`, which knows slow ranks from dead ones."""


class Backend(Protocol):
    """gloo's process group, as far as it is used here."""

    def allgather(
        self, output_tensors: list[list[torch.Tensor]], input_tensors: list[torch.Tensor], /
    ) -> Work: ...


class Collective:
    """Rows of `width` int64, one of each rank."""

    def __init__(self, backend: Backend, size: int, width: int) -> None:
        self._backend = backend
        self._sent = torch.zeros(width, dtype=torch.int64)
        self._gathered = torch.zeros(size, width, dtype=torch.int64)
        self._outputs = [list(self._gathered.unbind(0))]

    @property
    def size(self) -> int:
        return len(self._gathered)

    @classmethod
    def connect(cls, store: Store, rank: int, size: int, *, width: int, host: str) -> "Collective":
        """Connect all ranks of `store`; `host` is the address of this one. `GroupError` if that fails."""
        try:
            return cls(gloo_backend(store, rank, size, host), size, width)
        except RuntimeError as error:
            raise GroupError(f"the ranks could not be connected: {short(error)}") from error

    def gather(self, row: Sequence[int], while_waiting: Callable[[], None]) -> list[list[int]]:
        """The rows of all ranks, in order of rank.

        `while_waiting` is called twice a second until they are there, and may raise. `ConnectionError` when
        a rank is lost. After any exception the collective is unusable.
        """
        self._sent.copy_(torch.tensor(row))
        try:
            work = self._backend.allgather(self._outputs, [self._sent])
        except RuntimeError as error:
            raise ConnectionError(short(error)) from error
        _wait(work, while_waiting)
        rows: list[list[int]] = self._gathered.tolist()
        return rows


def gloo_backend(store: Store, rank: int, size: int, host: str) -> Backend:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub does not know it
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._threads = 1
    options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
    backend = ProcessGroupGloo(store, rank, size, options)
    backend._set_default_timeout(FOREVER)
    return backend  # type: ignore[return-value]  # the stub lacks the collectives


def _wait(work: Work, while_waiting: Callable[[], None]) -> None:
    """A wait that timed out leaves the operation running."""
    while True:
        is_completed = work.is_completed()
        try:
            work.wait(timedelta(seconds=WAIT_SLICE_S))
            return
        except RuntimeError as error:
            if is_completed:
                raise ConnectionError(short(error)) from error
        if not work.is_completed():
            while_waiting()


def short(error: Exception) -> str:
    """The part of a backend's message that says what happened."""
    text = re.sub(r"^\[[^\]]*\]\s*", "", str(error).splitlines()[0])
    return text.split(". This is typically")[0]
