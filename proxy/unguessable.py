"""Random ids and seeds that nobody can guess, drawn from the kernel many at a time."""

import os

POOL_BYTES = 4096


class _Pool:
    def __init__(self) -> None:
        self._bytes = b""
        self._start = 0
        os.register_at_fork(after_in_child=self._forget)

    def take(self, num_bytes: int) -> bytes:
        """Never the same ones twice; at most POOL_BYTES."""
        end = self._start + num_bytes
        if end > len(self._bytes):
            self._bytes, self._start, end = os.urandom(POOL_BYTES), 0, num_bytes
        taken = self._bytes[self._start : end]
        self._start = end
        return taken

    def _forget(self) -> None:
        self._bytes, self._start = b"", 0


_pool = _Pool()


def new_id() -> str:
    """128 bits, in hexadecimal."""
    return _pool.take(16).hex()


def new_seed() -> int:
    """63 bits."""
    return int.from_bytes(_pool.take(8), "little") >> 1
