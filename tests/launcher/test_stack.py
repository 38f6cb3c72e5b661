"""The stack's options reach the services as their own flags."""

import pytest

from launcher.stack import StackSettings, stack_specs


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"--no-overlap", "--stop-preempted-request"}),
        ({"overlap": True, "stop_preempted_request": False}, {"--overlap", "--no-stop-preempted-request"}),
    ],
)
def test_switches_are_passed_on_to_every_engine(settings: dict[str, bool], expected: set[str]) -> None:
    specs = stack_specs(StackSettings.model_validate({"engine": "pair", **settings}))
    for spec in specs:
        assert (expected <= set(spec.arguments)) == (spec.name != "proxy")
