"""A cheap hash that tells two revisions of a model apart without reading all of its weights."""

import hashlib
import mmap
from collections.abc import Iterable

_NUM_SAMPLES = 32
_SAMPLE_BYTES = 4096
_HEX_DIGITS = 16


def fingerprint(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:_HEX_DIGITS]


def sample(file: mmap.mmap, *, header_bytes: int) -> bytes:
    """The file's size, its first `header_bytes`, and evenly spread pieces of the rest."""
    pieces = [str(len(file)).encode(), file[:header_bytes]]
    rest_bytes = len(file) - header_bytes
    for index in range(_NUM_SAMPLES):
        start = header_bytes + rest_bytes * index // _NUM_SAMPLES
        pieces.append(file[start : start + _SAMPLE_BYTES])
    return b"".join(pieces)
