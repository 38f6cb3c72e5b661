"""Locates a model on this machine and reads its configuration, tokenizer and weights. Never imports torch."""

from model_files.config import ModelConfig, RopeScaling
from model_files.errors import ModelFilesError
from model_files.interface import Float32Array, ModelFiles, Weights
from model_files.resolve import EMBEDDED_MODEL, resolve_model

__all__ = [
    "EMBEDDED_MODEL",
    "Float32Array",
    "ModelConfig",
    "ModelFiles",
    "ModelFilesError",
    "RopeScaling",
    "Weights",
    "resolve_model",
]
