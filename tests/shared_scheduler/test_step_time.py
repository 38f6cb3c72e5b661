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
