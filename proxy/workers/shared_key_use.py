"""What API keys use, counted over all workers of a proxy: a table in a file that all of them have mapped.

A key has a slot: its digest, the requests it may send now and since when, and those it has open, by worker. A
worker that is started again empties its column. Every look takes a lock on the file for microseconds.
"""

import fcntl
import hashlib
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from proxy.key_limits import KeyLimits, Use, check, refill
from proxy.settings import MAX_WORKERS

NUM_SLOTS = 8192
NUM_PROBES = 16
"""A key is in one of so many slots. Where all have requests open, it shares the first with its owner."""

_HEAD = struct.Struct("<16sdd")
_ALLOWED = struct.Struct("<dd")
_NUM_OPEN = struct.Struct("<i")
_OPEN = struct.Struct(f"<{MAX_WORKERS}i")
_SLOT_BYTES = _HEAD.size + _OPEN.size
_NOBODY = bytes(16)


def create_table(directory: Path) -> None:
    with _path(directory).open("wb") as file:
        file.truncate(NUM_SLOTS * _SLOT_BYTES)


def _path(directory: Path) -> Path:
    return directory / "key-use"


class SharedKeyUse:
    """See `proxy.key_limits.KeyUse`, for one of several workers."""

    def __init__(self, limits: KeyLimits, clock: Callable[[], float], directory: Path, number: int) -> None:
        """`clock` must be the same for all workers, as `time.monotonic` is on one machine."""
        assert number < MAX_WORKERS
        self._limits = limits
        self._clock = clock
        self._number = number
        self._descriptor = os.open(_path(directory), os.O_RDWR)
        self._table = mmap.mmap(self._descriptor, NUM_SLOTS * _SLOT_BYTES)
        with self._locked():
            for slot in range(0, len(self._table), _SLOT_BYTES):
                self._set_open(slot, 0)

    @contextmanager
    def open(self, key: str) -> Iterator[None]:
        """Raises `Overloaded` where the key has used up what it may."""
        digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
        with self._locked():
            slot = self._slot(digest)
            use = self._use(slot)
            refill(use, self._limits, self._clock())
            try:
                check(use, self._limits)
                self._set_open(slot, self._own_open(slot) + 1)
            finally:
                _ALLOWED.pack_into(self._table, slot + len(_NOBODY), use.num_allowed, use.seen_s)
        try:
            yield
        finally:
            with self._locked():
                self._set_open(slot, self._own_open(slot) - 1)

    def close(self) -> None:
        self._table.close()
        os.close(self._descriptor)

    def check_invariants(self) -> None:
        """Nothing has fewer than no requests open; for a worker without any, nothing has some."""
        own = [self._own_open(slot) for slot in range(0, len(self._table), _SLOT_BYTES)]
        assert not any(own), max(own)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def _slot(self, digest: bytes) -> int:
        """The offset of the key's slot, which is its own from now on."""
        first = int.from_bytes(digest[:8], "little") % NUM_SLOTS
        slots = [(first + probe) % NUM_SLOTS * _SLOT_BYTES for probe in range(NUM_PROBES)]
        for slot in slots:
            if self._table[slot : slot + 16] == digest:
                return slot
        idle = [slot for slot in slots if not any(_OPEN.unpack_from(self._table, slot + _HEAD.size))]
        if not idle:
            return slots[0]
        slot = min(idle, key=self._seen_s)
        _HEAD.pack_into(self._table, slot, digest, float(self._limits.burst), self._clock())
        return slot

    def _seen_s(self, slot: int) -> float:
        """Slots of nobody come before all others."""
        owner, _, seen_s = _HEAD.unpack_from(self._table, slot)
        return -1.0 if owner == _NOBODY else float(seen_s)

    def _use(self, slot: int) -> Use:
        _, num_allowed, seen_s = _HEAD.unpack_from(self._table, slot)
        num_open = sum(_OPEN.unpack_from(self._table, slot + _HEAD.size))
        return Use(num_allowed, seen_s, num_open)

    def _own_open(self, slot: int) -> int:
        (num_open,) = _NUM_OPEN.unpack_from(self._table, self._place(slot))
        return int(num_open)

    def _set_open(self, slot: int, num_open: int) -> None:
        _NUM_OPEN.pack_into(self._table, self._place(slot), num_open)

    def _place(self, slot: int) -> int:
        return slot + _HEAD.size + self._number * _NUM_OPEN.size
