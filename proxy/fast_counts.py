"""Counters, gauges and histograms that every request touches: `prometheus_client`'s own take a lock and five
calls each time.

For one thread. A child is looked up by its labels once, and counted with `child.value += 1`.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from proxy.fast_histogram import FastHistogram


class Count:
    """One number of a family."""

    __slots__ = ("created_s", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.created_s = time.time()


class CountFamily(Collector):
    """All numbers of one name, by their labels."""

    def __init__(
        self,
        kind: Literal["counter", "gauge"],
        name: str,
        documentation: str,
        label_names: Sequence[str],
        registry: CollectorRegistry,
    ) -> None:
        self._kind = kind
        self._name = name
        self._documentation = documentation
        self._label_names = label_names
        self._counts: dict[tuple[str, ...], Count] = {}
        registry.register(self)

    def labels(self, *values: str) -> Count:
        try:
            return self._counts[values]
        except KeyError:
            assert len(values) == len(self._label_names)
            count = self._counts[values] = Count()
            return count

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        if self._kind == "gauge":
            gauges = GaugeMetricFamily(self._name, self._documentation, labels=self._label_names)
            for values, count in self._counts.items():
                gauges.add_metric(values, count.value)
            yield gauges
            return
        counters = CounterMetricFamily(self._name, self._documentation, labels=self._label_names)
        for values, count in self._counts.items():
            counters.add_metric(values, count.value, created=count.created_s)
        yield counters


class HistogramFamily(Collector):
    """Histograms of one name, by one label."""

    def __init__(
        self,
        name: str,
        documentation: str,
        label_name: str,
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._label_name = label_name
        self._bounds = bounds
        self._histograms: dict[str, FastHistogram] = {}
        registry.register(self)

    def of(self, label: str) -> FastHistogram:
        try:
            return self._histograms[label]
        except KeyError:
            histogram = FastHistogram(self._name, self._documentation, self._bounds)
            self._histograms[label] = histogram
            return histogram

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=(self._label_name,))
        for label, histogram in self._histograms.items():
            family.add_metric((label,), histogram.buckets(), histogram.sum)
        yield family
