"""What the rest of Tandem knows of a model on disk, whatever its file format."""

from collections.abc import Collection, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from model_files.config import ModelConfig

Float32Array = npt.NDArray[np.float32]
IntegerArray = npt.NDArray[np.integer]


class Weights(Protocol):
    """Tensors under their Hugging Face names, such as `model.layers.0.self_attn.q_proj.weight`."""

    def names(self) -> Collection[str]: ...

    def get(self, name: str) -> Float32Array:
        """The tensor, dequantised and C-contiguous, [out, in] for a linear layer; possibly a read-only view
        of the mapped file. ModelFilesError names a missing tensor. Safe to call from several threads."""
        ...

    def get_integers(self, name: str) -> IntegerArray | None:
        """A tensor stored as integers, such as a table of ids; None for one of numbers."""
        ...


class ModelFiles(Protocol):
    """One model on disk. Every method may raise ModelFilesError; none imports torch or transformers."""

    @property
    def name(self) -> str:
        """The model id shown to clients."""
        ...

    @property
    def revision(self) -> str:
        """Changes with the content: a hash over sizes, headers and samples of the weights."""
        ...

    def config(self) -> ModelConfig: ...

    def source_config(self) -> Mapping[str, object]:
        """The content of config.json, for the transformers package; empty where the format has none."""
        ...

    def tokenizer(self) -> Tokenizer: ...

    def chat_template(self) -> str | None: ...

    def special_tokens(self) -> dict[str, str]:
        """Such as `{"bos_token": "<s>", "eos_token": "</s>"}`, as a chat template sees them."""
        ...

    def weights(self) -> Weights: ...
