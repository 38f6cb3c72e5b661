"""Builds the kernels of this tree in place before tests that need them, if their sources are newer."""

import fcntl
import platform
import shutil
import subprocess
import sys
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "engine" / "native"


@lru_cache(maxsize=1)
def require_kernels() -> None:
    """Skips where an installation would do without them too: another processor, or no compiler."""
    if platform.machine() != "x86_64":
        pytest.skip(f"the kernels are for x86-64, this is {platform.machine()}")
    if shutil.which("g++") is None and shutil.which("c++") is None:
        pytest.skip("no C++ compiler here to build the kernels with")
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of the test workers builds
        if not is_up_to_date():
            build()


def is_up_to_date() -> bool:
    sources = [ROOT / "setup.py", *(NATIVE / "src").iterdir()]
    newest = max(source.stat().st_mtime for source in sources)
    built = NATIVE / f"_kernels{EXTENSION_SUFFIXES[0]}"
    return built.exists() and built.stat().st_mtime >= newest


def build() -> None:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if not is_up_to_date():
        pytest.fail(f"the kernels do not compile:\n{done.stdout}{done.stderr}")
