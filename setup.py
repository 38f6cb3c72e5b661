"""Builds the optional C++ kernels; everything else is in pyproject.toml.

Without a compiler, or on another processor than x86-64, the installation goes on without them.
"""

import platform

from setuptools import Extension, setup

KERNELS = Extension(
    "engine.native._kernels",
    sources=["engine/native/src/kernels.cpp"],
    depends=[
        f"engine/native/src/{name}.h"
        for name in ("attention", "decoder", "glue", "groups", "linear", "panels", "simd", "team")
    ],
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
