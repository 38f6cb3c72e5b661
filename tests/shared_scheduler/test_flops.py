import numpy as np
import pytest

from shared_scheduler import FlopsEstimator, ModelShape, Scheduler
from tests.shared_scheduler.builders import config, sequence

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=3,
    intermediate_size=16,
    vocab_size=50,
)
PER_TOKEN = 2 * 2 * (8 * (12 + 6 + 6) + 12 * 8 + 3 * 8 * 16)
PER_LOGITS = 2 * 8 * 50
PER_PAIR = 4 * 2 * 12


def lengths(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_decode_token_attends_to_all_k_positions() -> None:
    flops = FlopsEstimator(SHAPE).of_lengths(lengths(1), lengths(10), is_prompt=False)
    assert flops.attention == PER_PAIR * 10
    assert flops.total == PER_PAIR * 10 + PER_TOKEN + PER_LOGITS


def test_a_prompt_is_a_triangle_and_needs_one_row_of_logits() -> None:
    flops = FlopsEstimator(SHAPE).of_lengths(lengths(4), lengths(4), is_prompt=True)
    assert flops.attention == PER_PAIR * (1 + 2 + 3 + 4)
    assert flops.total == flops.attention + 4 * PER_TOKEN + PER_LOGITS


def test_chunks_add_up_to_the_whole() -> None:
    estimator = FlopsEstimator(SHAPE)
    whole = estimator.of_lengths(lengths(10), lengths(10), is_prompt=True).attention
    chunks = estimator.of_lengths(lengths(4, 6), lengths(4, 10), is_prompt=True).attention
    assert chunks == whole


def test_a_sliding_window_bounds_the_pairs() -> None:
    shape = ModelShape(**{name: getattr(SHAPE, name) for name in SHAPE.__slots__} | {"sliding_window": 3})
    flops = FlopsEstimator(shape).of_lengths(lengths(5), lengths(5), is_prompt=True)
    assert flops.attention == PER_PAIR * (1 + 2 + 3 + 3 + 3)


def test_a_step_is_the_sum_of_its_sequences() -> None:
    scheduler = Scheduler(config())
    scheduler.add_sequence(sequence("a", 5), 0.0)
    scheduler.add_sequence(sequence("b", 3), 0.0)
    estimator = FlopsEstimator(SHAPE)
    outputs = scheduler.schedule()
    expected = estimator.of_lengths(lengths(5, 3), lengths(5, 3), is_prompt=True)
    assert estimator.of_step(outputs).total == pytest.approx(expected.total)
    assert (outputs.sum_seqlen_qxk, outputs.max_seqlen_k, outputs.min_seqlen_k) == (34, 5, 3)


def test_an_empty_step_costs_nothing() -> None:
    assert FlopsEstimator(SHAPE).of_step(Scheduler(config()).schedule()).total == 0.0
