"""Under 32 long streams every kind of process fails in turn, in every way: `make chaos` (half an hour)."""

from collections.abc import Iterator

import pytest

from tests.system.chaos import FAULTS, Ask, Streams, bring_back
from tests.system.processes import RunningStack

pytestmark = pytest.mark.chaos

NUM_STREAMS = 32
NUM_TOKENS = 100
ENGINES = ("prompt-0", "prompt-1", "completion-0", "completion-1")


@pytest.fixture(scope="module")
def stack() -> Iterator[RunningStack]:
    grace = ("--grace-s", "2")
    with RunningStack(
        dtype="fp32",
        max_num_batched_tokens=64,
        prompt_engines=2,
        completion_engines=2,
        extra={
            "prompt": grace,
            "completion": (*grace, "--handover-wait-s", "300"),  # on busy machines prompts wait for minutes
            "proxy": ("--migration-wait-s", "60", "--first-byte-timeout-s", "300"),
        },
    ) as stack:
        yield stack


@pytest.fixture(scope="module")
def expected(stack: RunningStack) -> list[str]:
    return Streams(stack, asks()).run()


@pytest.fixture(scope="module")
def expected_of_prompts(stack: RunningStack) -> list[str]:
    return Streams(stack, asks_with_prompts()).run()


def asks_with_prompts() -> list[Ask]:
    """Most of them are being computed, or wait for that, when the first ones have an answer."""
    return [Ask(number, NUM_TOKENS // 4, num_words=30) for number in range(NUM_STREAMS)]


def asks() -> list[Ask]:
    return [Ask(number, NUM_TOKENS) for number in range(NUM_STREAMS)]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("fault", FAULTS)
def test_no_stream_fails_and_every_text_is_that_of_an_undisturbed_run(
    stack: RunningStack, expected: list[str], fault: str, name: str
) -> None:
    try:
        texts = Streams(stack, asks()).run(lambda: FAULTS[fault](stack.services[name]))
    finally:
        bring_back(stack, name, fault)
    assert texts == expected


@pytest.mark.parametrize("fault", FAULTS)
def test_no_prompt_that_is_being_computed_fails_and_every_text_is_that_of_an_undisturbed_run(
    stack: RunningStack, expected_of_prompts: list[str], fault: str
) -> None:
    name = "prompt-0"
    try:
        texts = Streams(stack, asks_with_prompts()).run(
            lambda: FAULTS[fault](stack.services[name]), after_chunks=1, num_begun=4
        )
    finally:
        bring_back(stack, name, fault)
    assert texts == expected_of_prompts
