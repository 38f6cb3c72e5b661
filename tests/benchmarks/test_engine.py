"""The rows of benchmarks.engine: what they count, and the floor they are compared with."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.engine import Load, compare_kernels, make_engine, run
from benchmarks.report import Report
from benchmarks.roofline import Machine, least_step_s
from model_files import resolve_model
from tests.engine.builders import save_tiny_model


@pytest.fixture
def arguments(tmp_path: Path) -> Namespace:
    """A tiny model with a tokenizer file, computed by torch."""
    save_tiny_model(tmp_path, "Llama", vocab_size=40_000)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"type": "BPE"}}))
    return Namespace(
        model=str(tmp_path), num_threads=1, streams=(3,), overlap=False, kernels=["torch"],
        prompt_tokens=40, output_tokens=6,
    )  # fmt: skip


def test_every_stream_has_a_first_token_and_steps_of_all_are_timed(arguments: Namespace) -> None:
    engine = make_engine(arguments, "fp32", "torch")
    measured = run(engine, Load(num_streams=3, num_prompt_tokens=40, num_output_tokens=6), seed=0)
    engine.close()
    assert len(measured.first_token_s) == 3
    assert len(measured.step_s) == 5
    assert measured.prefill_s == max(measured.first_token_s) > 0


def test_each_load_has_rates_and_their_share_of_the_roofline(arguments: Namespace) -> None:
    report = Report("engine")
    compare_kernels(report, Machine(bytes_per_s=1e10, flops=1e11), arguments, "fp32")
    assert [row.metric for row in report.rows] == [
        "prefill", "TTFT median", "decode step", "decode", "roofline, prefill", "roofline, decode",
    ]  # fmt: skip
    assert all(row.value > 0 for row in report.rows)


def test_a_step_takes_at_least_the_longer_of_reading_and_multiplying(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "Llama")
    config = resolve_model(str(tmp_path)).config()
    layer = 48 * (16 * (2 * 6 + 2 * 2) + 3 * 80)
    weights = 3 * layer + 48 * 128
    reading = Machine(bytes_per_s=1.0, flops=1e30)
    kv_bytes = 2 * 4 * 3 * 2 * 16 * 10
    assert least_step_s(reading, config, "fp16w", num_rows=1, num_logit_rows=1, num_keys=10) == pytest.approx(
        2 * weights + kv_bytes
    )
    multiplying = Machine(bytes_per_s=1e30, flops=1.0)
    assert least_step_s(
        multiplying, config, "fp16w", num_rows=4, num_logit_rows=2, num_keys=10
    ) == pytest.approx(2 * (4 * 3 * layer + 2 * 48 * 128) + 4 * 3 * 6 * 16 * 10)
