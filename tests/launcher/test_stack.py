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


def test_every_engine_of_a_role_is_a_service_of_its_own_that_the_proxy_knows() -> None:
    settings = {"engine": "pair", "prompt_engines": 2, "completion_engines": 3}
    *engines, proxy = stack_specs(StackSettings.model_validate(settings))
    assert [engine.name for engine in engines] == [
        "prompt-0", "prompt-1", "completion-0", "completion-1", "completion-2",
    ]  # fmt: skip
    urls = dict(zip(proxy.arguments[1::2], proxy.arguments[::2], strict=True))
    assert {engine.url: urls[engine.url] for engine in engines} == {
        engine.url: f"--{engine.name.partition('-')[0]}-url" for engine in engines
    }


def test_more_engines_of_a_role_need_pairs() -> None:
    with pytest.raises(ValueError, match="--prompt-engines needs --engine pair"):
        StackSettings.model_validate({"engine": "normal", "prompt_engines": 2})


def test_who_prefills_is_told_the_waiting_policy_and_who_decodes_the_admission_estimate() -> None:
    chosen = {"waiting_policy": "lof", "admission_estimate": False}
    both = {"--waiting-policy", "--no-admission-estimate"}
    prompt, completion, _ = stack_specs(StackSettings.model_validate({"engine": "pair", **chosen}))
    assert both & set(prompt.arguments) == {"--waiting-policy"}
    assert both & set(completion.arguments) == {"--no-admission-estimate"}
    normal, _ = stack_specs(StackSettings.model_validate({"engine": "normal", **chosen}))
    assert both <= set(normal.arguments)
