import numpy as np
import pytest

from shared_scheduler.step_time import StepTimeModel


def predict(model: StepTimeModel, num_sequences: int, num_tokens: int) -> float:
    return float(model.predict_s(num_sequences, np.array([num_tokens]))[0])


def test_a_line_is_recovered_from_two_points() -> None:
    model = StepTimeModel()
    model.observe(4, 4, forward_s=0.010, sampler_s=0.002)
    assert not model.is_fitted
    model.observe(8, 8, forward_s=0.014, sampler_s=0.003)
    assert predict(model, 12, 16) == pytest.approx(0.022 + 0.004)


def test_steps_are_padded_to_the_next_graph_size() -> None:
    model = StepTimeModel(graph_sizes=(4, 16))
    assert [model.graph_size(count) for count in (1, 4, 5, 16, 17)] == [4, 4, 16, 16, 17]


def test_new_observations_outweigh_old_ones() -> None:
    model = StepTimeModel()
    for _ in range(500):
        for count in (2, 8):
            model.observe(count, count, forward_s=0.010, sampler_s=0.0)
    for _ in range(300):
        for count in (2, 8):
            model.observe(count, count, forward_s=0.030, sampler_s=0.0)
    assert predict(model, 4, 4) == pytest.approx(0.030, rel=0.01)


def test_time_is_never_negative() -> None:
    model = StepTimeModel()
    model.observe(1, 10, forward_s=0.001, sampler_s=0.0)
    model.observe(1, 20, forward_s=0.010, sampler_s=0.0)
    assert predict(model, 1, 1) > 0.0


def test_noise_that_falls_with_size_is_taken_as_constant() -> None:
    model = StepTimeModel()
    model.observe(1, 10, forward_s=0.011, sampler_s=0.0)
    model.observe(1, 20, forward_s=0.010, sampler_s=0.0)
    assert predict(model, 1, 100) == pytest.approx(0.0105, rel=0.01)


def test_a_shape_that_was_seen_three_times_takes_what_it_took() -> None:
    """No line says that two rows cost as much as five, and one half of it."""
    model = StepTimeModel()
    for _ in range(3):
        for count, forward_s in ((1, 0.073), (2, 0.140), (5, 0.140)):
            model.observe(1, count, forward_s=forward_s, sampler_s=0.002)
    assert [predict(model, 1, count) for count in (1, 2, 5)] == pytest.approx([0.075, 0.142, 0.142])
    assert 0.075 < predict(model, 2, 3) < 0.16


def test_the_mean_of_a_shape_follows_its_last_steps() -> None:
    model = StepTimeModel()
    for forward_s in [0.010] * 100 + [0.030] * 80:
        model.observe(1, 1, forward_s=forward_s, sampler_s=0.0)
    assert predict(model, 1, 1) == pytest.approx(0.030, rel=0.05)
