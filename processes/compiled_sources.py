"""What compiled libraries were built from, to tell one that is older than the sources beside it."""

import hashlib
from pathlib import Path


def digest_of(directory: Path) -> str | None:
    """Of the C++ sources in there, as in setup.py; None where there are none."""
    paths = sorted((*directory.glob("*.cpp"), *directory.glob("*.h")))
    if not paths:
        return None
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]
