"""Maps a model's file into memory."""

import mmap
from pathlib import Path

from model_files.errors import ModelFilesError


def map_file(path: Path) -> mmap.mmap:
    """The whole file, read-only; pages are read when they are touched."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise ModelFilesError(f"{path} is empty; download or convert it again") from None
    except OSError as error:
        raise ModelFilesError(f"cannot read {path}: {error.strerror}; check the path in --model") from None
