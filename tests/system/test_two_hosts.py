"""Whole services on two hosts: their link is cut, they die and stop; `make chaos` does it at every stage."""

from collections.abc import Iterator

import pytest

from tests.kv_transfer.namespaces import needs_namespaces
from tests.system.handover_faults import (
    FAULTS,
    STAGES,
    Disturbed,
    cut,
    disturbed,
)

pytestmark = [pytest.mark.system, needs_namespaces]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disturbed]:
    with disturbed(tmp_path_factory.mktemp("tiny")) as pair:
        yield pair


def test_link_cut_for_a_second_during_a_pull_costs_no_token(pair: Disturbed) -> None:
    stream = STAGES["pulling"](pair)
    cut(pair, 1.0)
    assert pair.end(stream).error is None
    pair.until_it_works_again()


@pytest.mark.parametrize(
    ("stage", "fault", "name"),
    [("announced", "kill -9", "completion"), ("pulling", "stop and go on", "prompt")],
)
def test_fault_at_a_stage_ends_with_the_right_tokens_or_an_error(
    pair: Disturbed, stage: str, fault: str, name: str
) -> None:
    stream = STAGES[stage](pair)
    FAULTS[fault](pair, name)
    pair.end(stream)
    pair.until_it_works_again()
