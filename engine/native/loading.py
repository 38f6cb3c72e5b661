"""Loads a model of the Llama family for the kernels."""

import torch

from engine.kv_pool import KVPool
from engine.model.linear import Linear, WeightFormat
from engine.model.loader import load_weights
from engine.model_runner import Runner
from engine.native.library import Library, Runtime
from engine.native.linear import Arena, NativeLinear
from engine.native.runner import NativeRunner
from model_files import ModelFiles


def load_native_runner(
    library: Library,
    files: ModelFiles,
    weight_format: WeightFormat,
    pool: KVPool,
    num_positions: int,
    num_threads: int | None,
) -> Runner:
    """The model with packed weights; its steps have `num_threads` threads of their own, torch's None."""
    runtime, arena = Runtime(library, num_threads or torch.get_num_threads()), Arena()

    def make(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return NativeLinear(runtime, arena, weight, bias, weight_format)

    weights = load_weights(files, make, max_positions=num_positions, num_threads=num_threads)
    return NativeRunner(runtime, files.config(), weights, pool)
