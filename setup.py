"""Builds the optional C++ kernels; everything else is in pyproject.toml.

Without a compiler, or on another processor than x86-64, the installation goes on without them.
"""

import hashlib
import platform
from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path(__file__).parent / "engine" / "native" / "src"


def digest_of_sources() -> str:
    """As in engine/native/library.py, which compares it where it finds the sources beside it."""
    paths = sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


KERNELS = Extension(
    "engine.native._kernels",
    sources=["engine/native/src/kernels.cpp"],
    depends=[
        f"engine/native/src/{name}.h"
        for name in ("attention", "decoder", "glue", "groups", "linear", "panels", "simd", "team")
    ],
    define_macros=[("TANDEM_SOURCES", f"0x{digest_of_sources()}ull")],
    language="c++",
    # The processor is asked before the library is loaded (engine/native/library.py).
    extra_compile_args=[
        *("-O3", "-g0", "-std=c++17", "-mavx2", "-mfma", "-mf16c"),
        *("-fno-math-errno", "-fvisibility=hidden", "-pthread"),
    ],
    extra_link_args=["-pthread"],
    optional=True,
)

setup(ext_modules=[KERNELS] if platform.machine() in ("x86_64", "AMD64") else [])
