"""Builds the optional C++ parts: the engine's kernels and the proxy's path of plain streams.

Without a compiler the installation goes on without them, and on another processor than x86-64 without the
kernels. With TANDEM_SANITIZE=1 they look after themselves (`make sanitize`). Everything else is in
pyproject.toml.
"""

import hashlib
import os
import platform
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).parent


def digest_of_sources(directory: str) -> str:
    """As in processes/compiled_sources.py, which compares it where the sources lie beside the library."""
    paths = sorted((*(ROOT / directory).glob("*.cpp"), *(ROOT / directory).glob("*.h")))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def headers(directory: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / directory).glob("*.h"))


SANITIZED = (
    ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
    if os.environ.get("TANDEM_SANITIZE") == "1"
    else []
)

KERNELS = Extension(
    "engine.native._kernels",
    sources=["engine/native/src/kernels.cpp"],
    depends=headers("engine/native/src"),
    define_macros=[("TANDEM_SOURCES", f"0x{digest_of_sources('engine/native/src')}ull")],
    language="c++",
    # The processor is asked before the library is loaded (engine/native/library.py).
    extra_compile_args=[
        *("-O3", "-g0", "-std=c++17", "-mavx2", "-mfma", "-mf16c"),
        *("-fno-math-errno", "-fvisibility=hidden", "-pthread"),
        *SANITIZED,
    ],
    extra_link_args=["-pthread", *SANITIZED],
    optional=True,
)

PLAIN_STREAMS = Extension(
    "proxy.native._plain_streams",
    sources=["proxy/native/src/module.cpp"],
    depends=headers("proxy/native/src"),
    define_macros=[("TANDEM_SOURCES", f'"{digest_of_sources("proxy/native/src")}"')],
    language="c++",
    extra_compile_args=["-O2", "-g0", "-std=c++17", "-fvisibility=hidden", *SANITIZED],
    extra_link_args=SANITIZED,
    optional=True,
)

# An installation for a proxy alone has no use for them.
HAS_KERNELS = platform.machine() in ("x86_64", "AMD64") and "TANDEM_WITHOUT_KERNELS" not in os.environ

setup(ext_modules=[PLAIN_STREAMS, KERNELS] if HAS_KERNELS else [PLAIN_STREAMS])
