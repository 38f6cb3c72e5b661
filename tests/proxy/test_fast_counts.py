"""Counts of requests print what `prometheus_client`'s own would."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from proxy.fast_counts import CountFamily, HistogramFamily

ENDPOINTS = st.sampled_from(("/a", "/b"))
STATUSES = st.sampled_from(("200", "400"))


@given(st.lists(st.tuples(ENDPOINTS, STATUSES, st.integers(0, 5))))
def test_counters_and_gauges_print_what_ordinary_ones_print(counted: list[tuple[str, str, int]]) -> None:
    expected, found = CollectorRegistry(), CollectorRegistry()
    names = ("endpoint", "status")
    counter = Counter("some", "Words", names, registry=expected)
    gauge = Gauge("now", "More words", names, registry=expected)
    fast_counter = CountFamily("counter", "some", "Words", names, found)
    fast_gauge = CountFamily("gauge", "now", "More words", names, found)
    for endpoint, status, amount in counted:
        counter.labels(endpoint, status).inc(amount)
        fast_counter.labels(endpoint, status).value += amount
        gauge.labels(endpoint, status).dec(amount)
        fast_gauge.labels(endpoint, status).value -= amount
    assert _lines(found) == _lines(expected)


@given(st.lists(st.tuples(ENDPOINTS, st.sampled_from((0.0, 0.5, 7.0)))))
def test_histograms_with_a_label_print_what_ordinary_ones_print(observed: list[tuple[str, float]]) -> None:
    expected, found = CollectorRegistry(), CollectorRegistry()
    ordinary = Histogram("name", "Words", ("endpoint",), buckets=(0.1, 2.0), registry=expected)
    fast = HistogramFamily("name", "Words", "endpoint", (0.1, 2.0), found)
    for endpoint, value in observed:
        ordinary.labels(endpoint).observe(value)
        fast.of(endpoint).observe(value)
    assert _lines(found) == _lines(expected)


def test_when_a_counter_was_created_is_told() -> None:
    registry = CollectorRegistry()
    count = CountFamily("counter", "some", "Words", ("endpoint",), registry).labels("/a")
    assert registry.get_sample_value("some_created", {"endpoint": "/a"}) == count.created_s


def _lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
