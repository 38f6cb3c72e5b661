"""llama.cpp as it was built from its sources, behind the few functions of llama_cpp.c."""

import ctypes
import subprocess
import tempfile
from ctypes import POINTER, c_char_p, c_int, c_int32, c_void_p
from pathlib import Path

SHIM = Path(__file__).with_name("llama_cpp.c")


class Row(ctypes.Structure):
    _fields_ = (
        ("token", c_int32),
        ("position", c_int32),
        ("sequence", c_int32),
        ("wants_logits", c_int32),
    )


class Build:
    """`directory`: sources; `libraries`: where its libllama.so and libggml*.so lie."""

    def __init__(self, directory: Path, libraries: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            shim = Path(scratch) / "shim.so"
            includes = [f"-I{directory / path}" for path in ("include", "ggml/include")]
            links = [f"-L{libraries}", "-lllama", f"-Wl,-rpath,{libraries.resolve()}"]
            subprocess.run(
                ["cc", "-O2", "-shared", "-fPIC", *includes, str(SHIM), *links, "-o", str(shim)], check=True
            )
            library = ctypes.CDLL(str(shim))
        self._model = library.bench_model
        self._model.restype, self._model.argtypes = c_void_p, (c_char_p,)
        self._context = library.bench_context
        self._context.restype, self._context.argtypes = c_void_p, (c_void_p, c_int, c_int, c_int, c_int)
        self._free = library.bench_free
        self._free.restype, self._free.argtypes = None, (c_void_p,)
        self._copy = library.bench_copy
        self._copy.restype, self._copy.argtypes = None, (c_void_p, c_int, c_int)
        self._decode = library.bench_decode
        self._decode.restype, self._decode.argtypes = c_int, (c_void_p, POINTER(Row), c_int)
        self._system = library.bench_system
        self._system.restype, self._system.argtypes = c_char_p, ()

    @property
    def features(self) -> str:
        """Of the processor, as far as this build uses them."""
        return self._system().decode()  # type: ignore[no-any-return]

    def model(self, path: Path) -> int:
        model: int | None = self._model(str(path).encode())
        if model is None:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        return model

    def context(
        self, model: int, num_tokens: int, num_sequences: int, batch_tokens: int, num_threads: int
    ) -> int:
        context: int | None = self._context(model, num_tokens, num_sequences, batch_tokens, num_threads)
        if context is None:
            raise RuntimeError(f"llama.cpp makes no context for {num_sequences} sequences")
        return context

    def free(self, context: int) -> None:
        self._free(context)

    def copy(self, context: int, source: int, target: int) -> None:
        """Sequence `target` becomes what `source` is."""
        self._copy(context, source, target)

    def decode(self, context: int, rows: "ctypes.Array[Row]") -> None:
        code = self._decode(context, rows, len(rows))
        if code:
            raise RuntimeError(f"llama_decode answered {code}")
