"""What a machine could do: memory bandwidth and matrix rate, measured, and the time a step needs at least."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from model_files import ModelConfig

_READ_BYTES = 512 << 20
_MATRIX_SIZE = 1024
_REPEATS = 8
WEIGHT_BYTES = {"fp32": 4.0, "fp16w": 2.0}


@dataclass(frozen=True, slots=True)
class Machine:
    bytes_per_s: float
    """Of a read, by all threads."""
    flops: float
    """Of a float32 matrix product."""


@torch.inference_mode()
def measure() -> Machine:
    """With torch's threads; the best of several tries."""
    numbers = torch.ones(_READ_BYTES // 4)
    a, product = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE), torch.empty(_MATRIX_SIZE, _MATRIX_SIZE)
    read_s = _fastest_s(lambda: numbers.sum())
    multiply_s = _fastest_s(lambda: torch.mm(a, a, out=product))
    return Machine(_READ_BYTES / read_s, 2.0 * _MATRIX_SIZE**3 / multiply_s)


def least_step_s(
    machine: Machine, config: ModelConfig, dtype: str, *, num_rows: int, num_logit_rows: int, num_keys: int
) -> float:
    """Weights read once, keys and values read once, every product at the matrix rate: the larger of both.

    `num_keys`: what all rows together attend to.
    """
    layers = config.num_layers * _layer_weights(config)
    head = config.hidden_size * config.vocab_size
    kv_bytes = 8.0 * config.num_layers * config.num_kv_heads * config.head_dim * num_keys
    num_bytes = (layers + head) * WEIGHT_BYTES[dtype] + kv_bytes
    attention = 4.0 * config.num_layers * config.num_heads * config.head_dim * num_keys
    num_flops = 2.0 * (layers * num_rows + head * num_logit_rows) + attention
    return max(num_bytes / machine.bytes_per_s, num_flops / machine.flops)


def _layer_weights(config: ModelConfig) -> int:
    attention = config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    return config.hidden_size * (attention + 3 * config.intermediate_size)


def _fastest_s(call: Callable[[], object]) -> float:
    times_s = []
    for _ in range(_REPEATS):
        started_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - started_s)
    return min(times_s)
