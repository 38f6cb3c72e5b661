"""Whole services on two hosts, disturbed at every stage of a hand-over in every way: `make chaos`."""

from collections.abc import Iterator

import pytest

from tests.kv_transfer.namespaces import needs_namespaces
from tests.system.handover_faults import FAULTS, LEASE_S, NUM_PROMPT_TOKENS, STAGES, Disturbed, cut, disturbed
from tests.system.processes import eventually

SHORT_LEASE_S = 0.5

pytestmark = [pytest.mark.chaos, needs_namespaces]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disturbed]:
    with disturbed(tmp_path_factory.mktemp("tiny")) as pair:
        yield pair


@pytest.mark.parametrize("name", ["prompt", "completion"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stage", STAGES)
def test_fault_at_a_stage_ends_with_the_right_tokens_or_an_error(
    pair: Disturbed, stage: str, fault: str, name: str
) -> None:
    stream = STAGES[stage](pair)
    FAULTS[fault](pair, name)
    outcome = pair.end(stream)
    print(f"{stage}, {fault} of {name}: {outcome.error or 'right'} after {outcome.took_s:.1f} s")
    pair.until_it_works_again()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("cut_s", [1.0, 3.0, 30.0])
def test_link_cut_at_a_stage_ends_with_the_right_tokens_or_an_error(
    pair: Disturbed, cut_s: float, stage: str
) -> None:
    stream = STAGES[stage](pair)
    cut(pair, cut_s)
    outcome = pair.end(stream)
    print(f"{stage}, link cut for {cut_s:g} s: {outcome.error or 'right'} after {outcome.took_s:.1f} s")
    assert outcome.error is None or cut_s >= LEASE_S
    pair.until_it_works_again()


def test_a_lease_far_shorter_than_the_queue_of_the_completion_engine(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A long answer takes what the pool has; the next prompt waits for room, under its lease."""
    with disturbed(tmp_path_factory.mktemp("short"), lease_s=SHORT_LEASE_S) as pair:
        long = pair.send(num_tokens=1000)
        eventually(lambda: long.num_chunks > 1, "it decodes")
        waited = pair.end(pair.send(num_tokens=8))
        assert waited.error is None
        assert waited.took_s > 4 * SHORT_LEASE_S
        assert pair.end(long).error is None
        pair.until_it_works_again()


def test_a_completion_engine_that_refuses_leaves_the_handover_to_another_one(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Both are full; the one that waits less long declines, the other takes what was computed once."""
    declines = ("--room-wait-s", "1")
    path = tmp_path_factory.mktemp("two")
    with disturbed(path, completion=declines, another=declines) as pair:
        long = [pair.send(num_tokens=1000) for _ in range(2)]
        eventually(lambda: all(stream.num_chunks > 1 for stream in long), "both decode")
        computed = pair.prompt.metric("tandem_engine_prompt_tokens_total")
        waited = pair.end(pair.send(num_tokens=8))
        print(f"declined by both: {waited.error or 'right'} after {waited.took_s:.1f} s")
        passed = pair.stack.services["proxy"].metric("tandem_proxy_migrations_total")
        assert passed >= 1
        if waited.error is None:
            assert pair.prompt.metric("tandem_engine_prompt_tokens_total") - computed <= 2 * NUM_PROMPT_TOKENS
        for stream in long:
            assert pair.end(stream).error is None
        pair.until_it_works_again()
