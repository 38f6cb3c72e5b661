"""Loads a model of the Llama family for the kernels."""

import torch

from engine.errors import WeightFormatError
from engine.kv_pool import KVPool
from engine.model.linear import Linear, WeightFormat
from engine.model.llama import LlamaWeights
from engine.model.loader import load_weights
from engine.model.shards import WHOLE, Collectives, Shard
from engine.model_runner import Runner
from engine.native.library import Runtime
from engine.native.linear import Arena, NativeLinear, PanelFormat
from engine.native.runner import NativeRunner
from model_files import ModelFiles


def load_native_runner(
    runtime: Runtime,
    files: ModelFiles,
    weight_format: WeightFormat,
    pool: KVPool,
    num_positions: int,
    num_threads: int | None,
) -> Runner:
    """The model with packed weights, which `num_threads` pack; None: all usable cores."""
    weights = load_native_weights(runtime, files, weight_format, num_positions, num_threads)
    return NativeRunner(runtime, files.config(), weights, pool)


def load_native_weights(
    runtime: Runtime,
    files: ModelFiles,
    weight_format: WeightFormat,
    num_positions: int,
    num_threads: int | None,
    shard: Shard = WHOLE,
    collectives: Collectives | None = None,
) -> LlamaWeights:
    """As `load_weights`, packed for the kernels; WeightFormatError for q4 of files without such weights."""
    arena, made = Arena(), list[NativeLinear]()

    def make(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        linear = NativeLinear(runtime, arena, weight, bias, weight_format)
        made.append(linear)
        return linear

    weights = load_weights(
        files,
        make,
        max_positions=num_positions,
        num_threads=num_threads,
        shard=shard,
        collectives=collectives,
    )
    if weight_format == "q4" and all(linear.format is not PanelFormat.INT4 for linear in made):
        raise WeightFormatError(
            f"{files.name} has no weights of 4 bits in groups of 32, such as Q4_0 or Q4_1, and none are "
            "made; start with --dtype fp16w"
        )
    return weights
