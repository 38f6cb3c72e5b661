"""One line for every ten seconds of activity, with figures that can be checked by hand."""

import logging

import numpy as np
import pytest

from engine.activity import ActivityLog, make_activity_log, measure_peak_flops, model_shape
from model_files import ModelConfig
from shared_scheduler import EngineType, FlopsEstimator, Scheduler, SchedulerConfig, Sequence
from tests.engine.pair import greedy

NUM_PROMPT = 4
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=1,
    hidden_size=2,
    num_layers=500_000_000,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    intermediate_size=1,
    max_position_embeddings=16,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
)
"""GFLOPs of a prompt of four tokens: 40 for its 10 pairs in attention, 4 * 22 for each token's matrices."""


def scheduler_of_two() -> Scheduler:
    scheduler = Scheduler(
        SchedulerConfig(
            engine_type=EngineType.NORMAL,
            block_size=4,
            num_blocks=11,
            max_num_seqs=8,
            max_num_batched_tokens=NUM_PROMPT,
            max_model_len=16,
        )
    )
    for name in "ab":
        scheduler.add_sequence(Sequence(name, [5] * NUM_PROMPT, greedy(5), block_size=4), 0.0)
    return scheduler


def test_the_line_adds_up_and_comes_once_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scheduler = scheduler_of_two()
    outputs = scheduler.schedule()
    scheduler.process_outputs(outputs, np.array([7]), now_s=0.0)
    log = ActivityLog(FlopsEstimator(model_shape(CONFIG)), peak_flops=256e9)
    log.count(outputs, 1, 4.0, scheduler)
    assert not caplog.messages
    log.count(outputs, 1, 6.0, scheduler)
    log.count(outputs, 1, 9.9, scheduler)
    assert caplog.messages == [
        "2 steps in 10.0 s: prompt 0.8 tokens/s, output 0.2 tokens/s; 1 running, 1 waiting, KV 10 % used; "
        "attention 8.00 GFLOP/s, total 25.60 GFLOP/s, MFU 10.0 % of 256 GFLOP/s"
    ]


def test_nothing_is_measured_or_counted_when_nobody_would_see_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="engine.activity")
    assert make_activity_log(CONFIG, peak_gflops=1.0) is not None
    caplog.set_level(logging.WARNING, logger="engine.activity")
    assert make_activity_log(CONFIG, peak_gflops=None) is None


def test_the_measured_peak_is_one_that_a_machine_can_have() -> None:
    assert 1e8 < measure_peak_flops() < 1e16
