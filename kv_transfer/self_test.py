"""What a sink measures when it first meets a source, before any hand-over: is the path right, and how fast?

Both sides register a scratch region beside their pools. The sink reads one block of the source's a few times,
then all of them, and compares the bytes with what the source must have written there.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.errors import ReadError
from kv_transfer.layout import Region
from kv_transfer.memory import HugePageRegion
from kv_transfer.transport import BlockRead, Connection

logger = logging.getLogger(__name__)

BLOCK_BYTES = 64 << 10
NUM_BLOCKS = 64
NUM_SLOTS = 4
"""Sources that a sink can test at the same time."""

NUM_PINGS = 4
"""Reads of one block; the first also sets the connection up and is not counted."""


def pattern(epoch: int) -> npt.NDArray[np.uint8]:
    """What a source of this epoch holds in its scratch region, `[NUM_BLOCKS, BLOCK_BYTES]`."""
    words = np.random.default_rng(epoch).integers(0, 2**63, NUM_BLOCKS * BLOCK_BYTES // 8, dtype=np.int64)
    return words.view(np.uint8).reshape(NUM_BLOCKS, BLOCK_BYTES)


class SourceScratch:
    """Memory of a source that any reader may read at any time."""

    def __init__(self, epoch: int) -> None:
        self._memory = HugePageRegion(NUM_BLOCKS * BLOCK_BYTES)
        self._memory.buffer[:] = pattern(epoch).reshape(-1)
        self.region = Region("scratch", self._memory.address, BLOCK_BYTES, NUM_BLOCKS)


class SinkScratch:
    """Destinations of self-tests, one for each test under way."""

    def __init__(self) -> None:
        self._memory = HugePageRegion(NUM_SLOTS * NUM_BLOCKS * BLOCK_BYTES)
        self._blocks = self._memory.buffer.reshape(NUM_SLOTS, NUM_BLOCKS, BLOCK_BYTES)
        self._free = list(range(NUM_SLOTS))
        self.region = Region("scratch", self._memory.address, BLOCK_BYTES, NUM_SLOTS * NUM_BLOCKS)

    def take(self) -> int | None:
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        assert slot not in self._free
        self._free.append(slot)

    def blocks(self, slot: int) -> npt.NDArray[np.uint8]:
        blocks: npt.NDArray[np.uint8] = self._blocks[slot]
        return blocks


@dataclass(frozen=True, slots=True)
class Measured:
    """The path works; `latency_s` is that of one block of 64 KiB."""

    latency_s: float
    rate_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Broken:
    message: str


class SelfTest:
    """`poll` until it returns something; `close` in any case, after the connection where that is cut."""

    def __init__(
        self,
        connection: Connection,
        region: int,
        scratch: SinkScratch,
        epoch: int,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`region`: index of the scratch region on both sides; `epoch`: the source's."""
        self._connection = connection
        self._region = region
        self._scratch = scratch
        self._epoch = epoch
        self._timer = timer
        self._slot: int | None = None
        self._read_id: int | None = None
        self._began_s = 0.0
        self._walls: list[float] = []

    @property
    def is_waiting(self) -> bool:
        """Others are tested; nothing has been read yet."""
        return self._slot is None

    def poll(self) -> Measured | Broken | None:
        if self._read_id is None:
            return self._next()
        for result in self._connection.poll():
            if result.read_id == self._read_id:
                self._read_id = None
                self._walls.append(self._timer() - self._began_s)
                if result.error is not None:
                    return Broken(result.error)
        return self._next() if self._read_id is None else None

    def close(self) -> None:
        """Every read is over: the destination may be used again."""
        if self._slot is not None:
            self._scratch.give_back(self._slot)
            self._slot = None

    def _next(self) -> Measured | Broken | None:
        """Start the next read; None while there is one under way or no slot is free."""
        if self._slot is None:
            self._slot = self._scratch.take()
            if self._slot is None:
                return None
            self._scratch.blocks(self._slot)[:] = 0
        if len(self._walls) > NUM_PINGS:
            return self._judge(self._slot)
        ids = np.arange(1 if len(self._walls) < NUM_PINGS else NUM_BLOCKS, dtype=np.int32)
        local = ids + np.int32(self._slot * NUM_BLOCKS)
        self._began_s = self._timer()
        try:
            self._read_id = self._connection.read([BlockRead(self._region, ids, local)])
        except ReadError as error:
            return Broken(str(error))
        return None

    def _judge(self, slot: int) -> Measured | Broken:
        if not np.array_equal(self._scratch.blocks(slot), pattern(self._epoch)):
            return Broken("the bytes that arrived are not those that were read")
        *pings, whole_s = self._walls[1:]
        return Measured(min(pings), NUM_BLOCKS * BLOCK_BYTES / max(whole_s, 1e-9))
