"""The engine's log line: what it did in the last seconds of activity, how much of the machine that took."""

import logging
import time
from dataclasses import dataclass

import torch

from model_files import ModelConfig
from shared_scheduler import FlopsEstimator, ModelShape, Scheduler, SchedulerOutputs

logger = logging.getLogger(__name__)

LINE_INTERVAL_S = 10.0
_GIGA = 1e9
_PEAK_MATRIX_SIZE = 1024
_PEAK_MEASURE_S = 0.15


@dataclass(slots=True)
class _Window:
    """Sums since the last line."""

    busy_s: float = 0.0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_decoded_sequences: int = 0
    num_decoded_tokens: int = 0
    num_drafts: int = 0
    attention_flops: float = 0.0
    total_flops: float = 0.0


class ActivityLog:
    """Writes one INFO line for every `interval_s` seconds spent in steps; rates are per second of these."""

    def __init__(
        self, estimator: FlopsEstimator, peak_flops: float, interval_s: float = LINE_INTERVAL_S
    ) -> None:
        """`peak_flops`: floating-point operations per second that count as full use of the machine."""
        self._estimator = estimator
        self._peak_flops = peak_flops
        self._interval_s = interval_s
        self._window = _Window()

    def count(
        self, outputs: SchedulerOutputs, num_output_tokens: int, busy_s: float, scheduler: Scheduler
    ) -> None:
        """A step is done that kept the engine busy for `busy_s`."""
        window, flops = self._window, self._estimator.of_step(outputs)
        window.busy_s += busy_s
        window.num_steps += 1
        window.num_prompt_tokens += outputs.num_batched_tokens if outputs.prompt_run else 0
        window.num_output_tokens += num_output_tokens
        if not outputs.prompt_run:
            window.num_decoded_sequences += len(outputs.sequences)
            window.num_drafts += outputs.num_batched_tokens - len(outputs.sequences)
            window.num_decoded_tokens += num_output_tokens
        window.attention_flops += flops.attention
        window.total_flops += flops.total
        if window.busy_s >= self._interval_s:
            self._write(window, scheduler)
            self._window = _Window()

    def _write(self, window: _Window, scheduler: Scheduler) -> None:
        seconds = window.busy_s
        logger.info(
            "%d steps in %.1f s: prompt %.1f tokens/s, output %.1f tokens/s; %d running, %d waiting, "
            "KV %.0f %% used; attention %.2f GFLOP/s, total %.2f GFLOP/s, MFU %.1f %% of %.0f GFLOP/s",
            window.num_steps,
            seconds,
            window.num_prompt_tokens / seconds,
            window.num_output_tokens / seconds,
            scheduler.num_running,
            scheduler.num_waiting,
            100 - 100 * scheduler.num_free_blocks / scheduler.num_usable_blocks,
            window.attention_flops / seconds / _GIGA,
            window.total_flops / seconds / _GIGA,
            100 * window.total_flops / seconds / self._peak_flops,
            self._peak_flops / _GIGA,
        )
        if window.num_drafts:
            logger.info(
                "%d drafts verified: %.2f tokens per sequence and decode step",
                window.num_drafts,
                window.num_decoded_tokens / window.num_decoded_sequences,
            )


def make_activity_log(config: ModelConfig, peak_gflops: float | None) -> ActivityLog | None:
    """None when nobody would see its lines; `peak_gflops` None measures the peak now."""
    if not logger.isEnabledFor(logging.INFO):
        return None
    peak_flops = measure_peak_flops() if peak_gflops is None else peak_gflops * _GIGA
    return ActivityLog(FlopsEstimator(model_shape(config)), peak_flops)


def model_shape(config: ModelConfig) -> ModelShape:
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        sliding_window=config.sliding_window,
    )


@torch.inference_mode()
def measure_peak_flops() -> float:
    """What a float32 matrix product reaches here, with the engine's threads, in FLOP/s."""
    size = _PEAK_MATRIX_SIZE
    a, product = torch.ones(size, size), torch.empty(size, size)
    torch.mm(a, a, out=product)  # starts the threads
    fastest_s, until_s = float("inf"), time.perf_counter() + _PEAK_MEASURE_S
    while (started_s := time.perf_counter()) < until_s:
        torch.mm(a, a, out=product)
        fastest_s = min(fastest_s, time.perf_counter() - started_s)
    return 2.0 * size**3 / fastest_s
