"""Random ids and seeds that nobody can guess, drawn from the kernel many at a time."""

import os
import struct

NUM_DRAWN = 128
ID_BYTES = 16
_SEEDS = struct.Struct(f"<{NUM_DRAWN}Q")

_ids: list[str] = []
_seeds: list[int] = []


def new_id() -> str:
    """128 bits, in hexadecimal."""
    if not _ids:
        drawn = os.urandom(NUM_DRAWN * ID_BYTES).hex()
        _ids.extend(drawn[start : start + 2 * ID_BYTES] for start in range(0, len(drawn), 2 * ID_BYTES))
    return _ids.pop()


def new_seed() -> int:
    """63 bits."""
    if not _seeds:
        _seeds.extend(_SEEDS.unpack(os.urandom(_SEEDS.size)))
    return _seeds.pop() >> 1


def _forget() -> None:
    """Two processes must not draw the same."""
    _ids.clear()
    _seeds.clear()


os.register_at_fork(after_in_child=_forget)
