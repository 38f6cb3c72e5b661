"""One answer of `/metrics` for all workers: every sample is the sum of theirs, with two exceptions."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

NOT_SUMMED = {"tandem_proxy_ready_engines": max}
"""All workers see the same engines. Beside these, times of creation: the first counts."""


class _Sample(msgspec.Struct, frozen=True, array_like=True):
    name: str
    labels: dict[str, str]
    value: float


class _Family(msgspec.Struct, frozen=True, array_like=True):
    name: str
    documentation: str
    kind: str
    samples: list[_Sample]


_decoder = msgspec.msgpack.Decoder(list[_Family])


def encode_samples(registry: Collector | CollectorRegistry) -> bytes:
    families = [
        _Family(
            family.name,
            family.documentation,
            family.type,
            [_Sample(sample.name, dict(sample.labels), sample.value) for sample in family.samples],
        )
        for family in registry.collect()
    ]
    return msgspec.msgpack.encode(families)


class MergedMetrics(Collector):
    """What several workers have told; to be registered where it is to be printed."""

    def __init__(self, told: Iterable[bytes]) -> None:
        """`told`: of `encode_samples`."""
        self._workers = [_decoder.decode(one) for one in told]

    def collect(self) -> Iterator[Metric]:
        by_name: dict[str, list[_Family]] = {}
        for family in (family for worker in self._workers for family in worker):
            by_name.setdefault(family.name, []).append(family)
        for same in by_name.values():
            yield _merged(same)


def _merged(families: Sequence[_Family]) -> Metric:
    first = families[0]
    merged = Metric(first.name, first.documentation, first.kind)
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in (sample for family in families for sample in family.samples):
        key = (sample.name, tuple(sample.labels.items()))
        before = values.get(key)
        values[key] = sample.value if before is None else _join(sample.name, before, sample.value)
    for (name, labels), value in values.items():
        merged.add_sample(name, dict(labels), value)
    return merged


def _join(name: str, left: float, right: float) -> float:
    if name.endswith("_created"):
        return min(left, right)
    join = NOT_SUMMED.get(name)
    return left + right if join is None else join(left, right)
