"""Loads the compiled kernels: one shared library behind a C interface (src/kernels.cpp)."""

import ctypes
import logging
from ctypes import c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from engine.config import KernelChoice
from engine.errors import KernelsError
from model_files import ModelConfig
from processes.compiled_sources import digest_of

logger = logging.getLogger(__name__)

_INTERFACE = 2
_CAPABLE = ("AVX2", "AVX512")
"""Names of torch for processors that the kernels are compiled for."""
MAX_HEAD_DIM = 256


class CLinear(ctypes.Structure):
    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("num_outputs", c_int32),
        ("num_inputs", c_int32),
        ("format", c_int32),
    )


class CLayer(ctypes.Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("qk_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", CLinear),
        ("output", CLinear),
        ("gate_up", CLinear),
        ("down", CLinear),
    )


class CShape(ctypes.Structure):
    _fields_ = (
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("vocab_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("sliding_window", c_int32),
        ("rms_norm_eps", c_float),
    )


class CModel(ctypes.Structure):
    _fields_ = (
        ("shape", CShape),
        ("num_positions", c_int32),
        ("embedding", c_void_p),
        ("rotations", c_void_p),
        ("final_norm", c_void_p),
        ("layers", c_void_p),
        ("head", CLinear),
    )


class CStep(ctypes.Structure):
    _fields_ = (
        ("num_tokens", c_int32),
        ("num_sequences", c_int32),
        ("num_logit_rows", c_int32),
        ("table_width", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("seqlens_q", c_void_p),
        ("seqlens_k", c_void_p),
        ("block_tables", c_void_p),
        ("logit_rows", c_void_p),
        ("pool", c_void_p),
        ("logits", c_void_p),
    )


class Library:
    """The functions of the shared library; they let go of the interpreter while they run."""

    def __init__(self, path: Path) -> None:
        """OSError where it cannot be loaded, AttributeError where it is something else."""
        self._functions = functions = ctypes.CDLL(str(path))
        self.interface = functions.tandem_interface
        self.interface.restype = c_int64
        self.sources = functions.tandem_sources
        self.sources.restype = c_uint64
        self.runtime = functions.tandem_runtime
        self.runtime.restype, self.runtime.argtypes = c_void_p, (c_int32,)
        self.close = functions.tandem_close
        self.close.restype, self.close.argtypes = None, (c_void_p,)
        self.packed_bytes = functions.tandem_packed_bytes
        self.packed_bytes.restype, self.packed_bytes.argtypes = c_int64, (c_int32, c_int64, c_int64)
        self.pack = functions.tandem_pack
        self.pack.restype, self.pack.argtypes = c_int32, (c_int32, c_void_p, c_int64, c_int64, c_void_p)
        self.linear = functions.tandem_linear
        self.linear.restype, self.linear.argtypes = None, (c_void_p, c_void_p, c_void_p, c_int32, c_void_p)
        self.attend = functions.tandem_attend
        self.attend.restype = None
        self.attend.argtypes = (c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_void_p)
        self.forward = functions.tandem_forward
        self.forward.restype, self.forward.argtypes = None, (c_void_p, c_void_p, c_void_p)


class Runtime:
    """The threads and buffers of one model's steps; KernelsError where the system has no such threads."""

    def __init__(self, library: Library, num_threads: int) -> None:
        self.library = library
        self.handle: int | None = library.runtime(num_threads)
        if self.handle is None:
            raise KernelsError(f"their {num_threads} threads cannot be started; lower --num-threads")

    def __del__(self) -> None:
        self.library.close(self.handle)


@lru_cache(maxsize=1)
def load_library() -> Library:
    """The kernels of this installation; KernelsError says why there are none."""
    path = library_path()
    if not path.exists():
        raise KernelsError("they were not built, for want of a C++ compiler when Tandem was installed")
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in _CAPABLE:
        raise KernelsError(f"they need a processor with AVX2, this one counts as {capability}")
    try:
        library = Library(path)
        found, sources = library.interface(), library.sources()
    except (OSError, AttributeError) as error:
        raise KernelsError(f"{path.name} cannot be loaded ({error}); install Tandem again") from None
    sizes = ctypes.sizeof(CModel) * 1_000 + ctypes.sizeof(CLayer) + ctypes.sizeof(CStep)
    if found != _INTERFACE * 1_000_000 + sizes:
        raise KernelsError(f"{path.name} is of another version; install Tandem again")
    if digest_of_sources() not in (None, sources):
        raise KernelsError(f"{path.name} was built from other sources than lie here; install Tandem again")
    return library


def library_path() -> Path:
    """Where this version of Python has it; that of another one may lie beside it."""
    return Path(__file__).parent / f"_kernels{EXTENSION_SUFFIXES[0]}"


def digest_of_sources() -> int | None:
    """None where they do not lie here, as in an installation that is no checkout."""
    digest = digest_of(Path(__file__).parent / "src")
    return None if digest is None else int(digest, 16)


def check_model(config: ModelConfig) -> None:
    """KernelsError for a model whose shape the kernels do not compute."""
    head_dim = config.head_dim
    if config.architecture == "transformers":
        raise KernelsError("this model is computed by the transformers package")
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise KernelsError(f"they need heads of 8, 16 .. {MAX_HEAD_DIM} dimensions, not {head_dim}")
    for name in ("hidden_size", "intermediate_size"):
        if getattr(config, name) % 8:
            raise KernelsError(f"they need a multiple of 8 as {name}, not {getattr(config, name)}")


def choose_runtime(choice: KernelChoice, config: ModelConfig, num_threads: int) -> Runtime | None:
    """What computes this model by `--kernels`: None is torch. KernelsError where `native` cannot be had."""
    if choice == "torch":
        return None
    try:
        check_model(config)
        return Runtime(load_library(), num_threads)
    except KernelsError as error:
        if choice == "native":
            raise KernelsError(f"--kernels native cannot be had: {error}; --kernels torch works") from None
        logger.info("torch computes the model, not the native kernels: %s", error)
        return None
