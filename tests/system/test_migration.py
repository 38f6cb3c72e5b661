"""Engines fail under streams of real processes: no stream fails and every text is that of an undisturbed run.

`tests/chaos` does the same with more streams, and with every fault on every process.
"""

from collections.abc import Iterator

import httpx
import pytest

from tests.system.chaos import FAULTS, Ask, Streams, bring_back
from tests.system.processes import RunningStack

pytestmark = pytest.mark.system

ASKS = [Ask(number, 48) for number in range(6)]


@pytest.fixture(scope="module")
def stack() -> Iterator[RunningStack]:
    with RunningStack(
        dtype="fp32",
        completion_engines=2,
        extra={"completion": ("--grace-s", "1"), "proxy": ("--migration-wait-s", "60")},
    ) as stack:
        yield stack


@pytest.fixture(scope="module")
def expected(stack: RunningStack) -> list[str]:
    return Streams(stack, ASKS).run()


def num_migrations(stack: RunningStack) -> float:
    lines = httpx.get(stack.url + "/metrics", timeout=5.0).text.splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("tandem_proxy_migrations_total{"))


@pytest.mark.parametrize("fault", ["kill -9 of the engine", "SIGTERM of the service"])
def test_streams_go_on_at_the_other_completion_engine(
    stack: RunningStack, expected: list[str], fault: str
) -> None:
    before = num_migrations(stack)
    texts = Streams(stack, ASKS).run(lambda: FAULTS[fault](stack.services["completion-0"]), after_chunks=4)
    assert texts == expected
    assert num_migrations(stack) > before
    bring_back(stack, "completion-0", fault)
