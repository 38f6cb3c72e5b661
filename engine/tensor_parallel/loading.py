"""Loads the part of a model that one rank computes: with the compiled kernels, or with torch."""

from engine.model.attention import TorchAttention
from engine.model.interface import AttentionBackend, DecoderModel
from engine.model.linear import WeightFormat
from engine.model.llama import LlamaModel
from engine.model.loader import load_model
from engine.model.shards import Collectives, Shard, local_config
from engine.native.attention import NativeAttention
from engine.native.library import Runtime
from engine.native.loading import load_native_weights
from model_files import ModelFiles


def load_shard(
    files: ModelFiles,
    weight_format: WeightFormat,
    *,
    runtime: Runtime | None,
    max_positions: int,
    num_threads: int,
    shard: Shard,
    collectives: Collectives | None,
) -> tuple[DecoderModel, AttentionBackend]:
    """The model of `shard` and its attention; `runtime` None: torch's.

    The ranks' sums lie between the products of a layer, so the kernels are called for each product and for
    attention, not once a step; torch does what lies between.
    """
    if runtime is None:
        model = load_model(
            files,
            weight_format,
            max_positions=max_positions,
            num_threads=num_threads,
            shard=shard,
            collectives=collectives,
        )
        return model, TorchAttention()
    weights = load_native_weights(
        runtime, files, weight_format, max_positions, num_threads, shard, collectives
    )
    return LlamaModel(local_config(files.config(), shard), weights), NativeAttention(runtime)
