"""Whole services on two hosts, disturbed at every stage of a hand-over in every way: `make chaos`."""

from collections.abc import Iterator

import pytest

from tests.kv_transfer.namespaces import needs_namespaces
from tests.system.handover_faults import FAULTS, LEASE_S, STAGES, Disturbed, cut, disturbed

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
