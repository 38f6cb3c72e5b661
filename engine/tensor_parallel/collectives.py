"""The collectives of one model's ranks: gloo between processes of one machine, NCCL between GPUs."""

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
from torch.distributed import AllreduceOptions, GatherOptions, Work
from torch.distributed.distributed_c10d import Store

from engine.collective import FOREVER, gloo_backend, short
from shared_scheduler import GroupError

LOOPBACK = "127.0.0.1"


class Backend(Protocol):
    """What gloo's and NCCL's process groups have in common."""

    def allreduce(self, tensors: list[torch.Tensor], options: AllreduceOptions, /) -> Work: ...

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: GatherOptions, /
    ) -> Work: ...


class RankCollectives:
    """`Collectives` of one rank. Raises `GroupError` when a rank is lost or silent for the time limit."""

    def __init__(self, backend: Backend, rank: int, size: int) -> None:
        self._backend = backend
        self._rank = rank
        self._size = size
        self._to_all = AllreduceOptions()
        self._to_first = GatherOptions()
        self._to_first.rootRank = 0

    @classmethod
    def connect(
        cls, store: Store, rank: int, size: int, *, timeout_s: float, device: torch.device
    ) -> "RankCollectives":
        """Meet the other ranks at `store`; `GroupError` if they do not come."""
        make = nccl_backend if device.type == "cuda" else gloo_backend
        try:
            backend = make(store, rank, size, LOOPBACK)
        except RuntimeError as error:
            raise GroupError(f"the ranks of --tp {size} could not be connected: {short(error)}") from error
        backend._set_default_timeout(timedelta(seconds=timeout_s))  # type: ignore[attr-defined]
        return cls(backend, rank, size)  # type: ignore[arg-type]  # the stub lacks the collectives

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        self._wait_for(lambda: self._backend.allreduce([tensor], self._to_all))
        return tensor

    def gather(self, part: torch.Tensor) -> list[torch.Tensor] | None:
        if self._rank > 0:
            self._wait_for(lambda: self._backend.gather([], [part], self._to_first))
            return None
        parts = [torch.empty_like(part) for _ in range(self._size)]
        self._wait_for(lambda: self._backend.gather([parts], [part], self._to_first))
        return parts

    def _wait_for(self, start: Callable[[], Work]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise GroupError(f"a rank of --tp {self._size} is lost or silent ({short(error)})") from error


def nccl_backend(store: Store, rank: int, size: int, host: str) -> object:
    from torch.distributed import ProcessGroupNCCL  # only in builds with CUDA

    options = ProcessGroupNCCL.Options()
    options._timeout = FOREVER
    return ProcessGroupNCCL(store, rank, size, options)
