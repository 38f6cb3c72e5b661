"""Engines fail under streams of real processes: no stream fails and every text is that of an undisturbed run.

`tests/chaos` does the same with more streams, and with every fault on every process.
"""

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.system.chaos import FAULTS, Ask, Streams, bring_back, drain_service
from tests.system.migrated_answers import Answers
from tests.system.processes import RunningStack, eventually

pytestmark = pytest.mark.system

GRACE_S = 40.0
ASKS = [*(Ask(number, 48) for number in range(4)), *(Ask(number, 7500, num_read=600) for number in (4, 5))]
"""Short ones, and two that would outlast the grace (at 8 ms a token they take a minute)."""


@pytest.fixture(scope="module")
def stack() -> Iterator[RunningStack]:
    with RunningStack(
        dtype="fp32",
        completion_engines=2,
        extra={"completion": ("--grace-s", str(GRACE_S)), "proxy": ("--migration-wait-s", "150")},
    ) as stack:
        yield stack


@pytest.fixture(scope="module")
def expected(stack: RunningStack) -> list[str]:
    return Streams(stack, ASKS).run()


def num_migrations(stack: RunningStack, reason: str) -> float:
    lines = httpx.get(stack.url + "/metrics", timeout=5.0).text.splitlines()
    found = [line for line in lines if line.startswith("tandem_proxy_migrations_total{")]
    return sum(float(line.split()[1]) for line in found if f'reason="{reason}"' in line)


def test_streams_of_a_killed_engine_go_on_at_the_other_completion_engine(
    stack: RunningStack, expected: list[str]
) -> None:
    """Of the two that do not end by themselves each has an engine of its own, so one of them is hit."""
    fault = "kill -9 of the engine"

    def kill() -> None:
        FAULTS[fault](stack.services["completion-0"])
        eventually(lambda: num_migrations(stack, "refused") > 0, "streams go on at the other engine")

    assert Streams(stack, ASKS).run(kill, after_chunks=4) == expected
    bring_back(stack, "completion-0", fault)


def test_a_service_that_drains_is_left_by_long_streams_at_once_and_by_short_ones_when_they_end(
    stack: RunningStack, expected: list[str]
) -> None:
    """The process is gone long before its grace ends; one of the two long streams was there."""
    service = stack.services["completion-0"]
    num_before = num_migrations(stack, "draining")

    def drain() -> None:
        drain_service(service)
        assert service.process.wait(0.75 * GRACE_S) == 0

    # Short ones have shown their pace by then: one that a pause made slow at its start would count as long.
    texts = Streams(stack, ASKS).run(drain, after_chunks=16)
    assert texts == expected
    assert num_migrations(stack, "draining") - num_before == 1
    bring_back(stack, "completion-0", "SIGTERM of the service")


def test_answers_of_every_kind_are_those_of_an_undisturbed_run(stack: RunningStack) -> None:
    """Both completion engines die, so that every answer is migrated."""
    Answers(stack, max_tokens=16).run()  # what is cached counts in usage: from here on it is the same
    undisturbed = Answers(stack).run()
    fault = "kill -9 of the engine"

    def kill_both() -> None:
        for name in ("completion-0", "completion-1"):
            FAULTS[fault](stack.services[name])

    migrated = Answers(stack).run(kill_both)
    for name, answer in migrated.items():
        expected = undisturbed[name]
        assert answer.joined == expected.joined, name
        assert answer.rest == expected.rest, name
        assert [token for token, _ in answer.logprobs] == [token for token, _ in expected.logprobs], name
        assert [value for _, value in answer.logprobs] == pytest.approx(
            [value for _, value in expected.logprobs], abs=1e-3
        )
    assert json.loads(migrated["structured chat with logprobs"].joined["0 content"])["cities"]
    assert int(migrated["two choices, not streamed"].num_migrations or 0) >= 2  # one for each choice
    assert undisturbed["two choices, not streamed"].num_migrations == "0"
    for name in ("completion-0", "completion-1"):
        bring_back(stack, name, fault)
