"""The histogram for tokens counts as `prometheus_client`'s own does."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from proxy.fast_histogram import FastHistogram

BOUNDS = (0.1, 0.5, 2.0)


@given(st.lists(st.sampled_from((0.0, 0.1, 0.3, 0.5, 1.0, 2.0, 7.0))))
def test_a_fast_histogram_prints_what_an_ordinary_one_prints(values: list[float]) -> None:
    expected, found = CollectorRegistry(), CollectorRegistry()
    ordinary = Histogram("name", "Words", buckets=BOUNDS, registry=expected)
    fast = FastHistogram("name", "Words", BOUNDS)
    found.register(fast)
    for value in values:
        ordinary.observe(value)
        fast.observe(value)
    assert _lines(found) == _lines(expected)


def _lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
