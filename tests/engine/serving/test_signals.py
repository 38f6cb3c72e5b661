"""Scaling signals: what waits, for how long, and how far tokens are apart, of the recent past."""

import msgspec
import pytest

from engine.ipc import EngineStats
from engine.serving.signals import HALF_LIFE_S, PromptRate, RecentIntervals, ScalingSignals
from tests.engine.serving.builders import STATS


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def signals(clock: Clock) -> ScalingSignals:
    return ScalingSignals(clock)


def test_a_prompt_is_queued_until_its_first_token(signals: ScalingSignals) -> None:
    signals.begin("a", 100)
    signals.begin("b", 20)
    assert signals.num_queued_tokens == 120
    signals.on_step(["a"])
    assert signals.num_queued_tokens == 20
    signals.on_step(["a"])
    signals.end("a")
    signals.end("b")
    signals.end("b")
    assert signals.num_queued_tokens == 0
    signals.check_invariants()


def test_outputs_of_a_request_that_has_ended_are_ignored(signals: ScalingSignals) -> None:
    signals.begin("a", 5)
    signals.end("a")
    signals.on_step(["a"])
    signals.check_invariants()


def test_the_first_token_is_predicted_from_what_was_computed_per_busy_second(signals: ScalingSignals) -> None:
    signals.begin("a", 3000)
    assert signals.predicted_first_token_s == 0.0
    signals.on_stats(replaced(num_prompt_tokens=800, num_cache_hit_tokens=200, busy_s=0.5))
    assert signals.predicted_first_token_s == pytest.approx(1.5)


def test_the_rate_is_of_the_recent_past_and_survives_a_new_engine() -> None:
    rate = PromptRate()
    rate.update(1000, 1.0)
    rate.update(1000 + 10 * 1000, 1.0 + 10 * HALF_LIFE_S)
    assert rate.seconds_for(50) == pytest.approx(1.0, rel=0.01)
    rate.update(100_000, 100_000 / 50)
    before = rate.seconds_for(50)
    rate.update(0, 0.0)
    assert rate.seconds_for(50) == before
    rate.update(50, 1.0)
    assert rate.seconds_for(50) == pytest.approx(1.0, rel=0.02)


def test_nine_of_ten_tokens_come_within_the_quantile(signals: ScalingSignals, clock: Clock) -> None:
    signals.begin("a", 1)
    signals.on_step(["a"])
    for number in range(20):
        clock.now_s += 0.5 if number in (3, 9) else 0.02
        signals.on_step(["a", "a"])
    assert 0.02 <= signals.inter_token_p90_s <= 0.02 * 1.25
    clock.now_s += 0.5
    signals.on_step(["a"])
    assert 0.5 <= signals.inter_token_p90_s <= 0.5 * 1.25


def test_intervals_are_forgotten() -> None:
    intervals = RecentIntervals()
    for _ in range(16):
        intervals.add(0.1, 0.0)
    assert intervals.quantile(0.9, 4 * HALF_LIFE_S) > 0.1 * 0.8
    assert intervals.quantile(0.9, 5 * HALF_LIFE_S) == 0.0


def replaced(**values: float) -> EngineStats:
    return msgspec.structs.replace(STATS, **values)
