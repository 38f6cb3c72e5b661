"""The stack's options reach the services as their own flags."""

import pytest

from launcher.ports import free_ports
from launcher.stack import StackSettings, stack_specs, threads_of_each


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


def test_any_flag_of_a_process_can_be_passed_on() -> None:
    chosen = {
        "prompt_args": "--lease-s 5",
        "completion_args": "--grace-s 7 --zone 'rack 1'",
        "proxy_args": "--max-migrations 2",
        "max_chunk_tokens": 64,
        "retract_cheapest": True,
    }
    prompt, completion, proxy = stack_specs(StackSettings.model_validate({"engine": "pair", **chosen}))
    assert prompt.arguments[-2:] == ("--lease-s", "5")
    assert "--max-chunk-tokens" in prompt.arguments
    assert completion.arguments[-4:] == ("--grace-s", "7", "--zone", "rack 1")
    assert "--retract-cheapest" in completion.arguments
    assert proxy.arguments[-2:] == ("--max-migrations", "2")
    del chosen["prompt_args"]
    normal, _ = stack_specs(StackSettings.model_validate({"engine": "normal", **chosen}))
    assert {"--max-chunk-tokens", "--retract-cheapest", "--grace-s"} <= set(normal.arguments)


@pytest.mark.parametrize("name", ["prompt_args", "completion_args", "proxy_args"])
def test_flags_that_are_not_well_quoted_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}: No closing quotation"):
        StackSettings.model_validate({name: "--zone 'a"})


def test_flags_of_engines_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="--prompt-args needs --engine pair"):
        StackSettings.model_validate({"engine": "normal", "prompt_args": "--lease-s 5"})


@pytest.mark.parametrize(
    ("settings", "num_threads"),
    [
        ({"engine": "pair"}, 4),
        ({"engine": "pair", "prompt_engines": 2}, 2),
        ({"engine": "pair", "prompt_engines": 6, "completion_engines": 6}, 1),
        ({"engine": "normal"}, 8),
        ({"engine": "normal", "dp": 2}, 4),
    ],
)
def test_the_cores_are_shared_out_among_the_engines(settings: dict[str, object], num_threads: int) -> None:
    assert threads_of_each(StackSettings.model_validate(settings), num_cores=8) == num_threads


def test_threads_that_are_given_are_those_of_each_engine() -> None:
    specs = stack_specs(StackSettings.model_validate({"engine": "pair", "num_threads": 3}))
    assert [spec.arguments[spec.arguments.index("--num-threads") + 1] for spec in specs[:-1]] == ["3", "3"]


def test_no_port_is_drawn_twice() -> None:
    """Of four hundred that are drawn one by one, some are equal: the kernel gives them at random."""
    assert len(set(free_ports(400))) == 400


@pytest.mark.parametrize(
    "settings", [{"prompt_engines": 2, "completion_engines": 3}, {"engine": "normal", "dp": 3}]
)
def test_every_process_listens_at_a_port_of_its_own(settings: dict[str, object]) -> None:
    *engines, _ = stack_specs(
        StackSettings.model_validate(settings), lambda num_ports: range(9000, 9000 + num_ports)
    )
    addresses = {
        spec.arguments[spec.arguments.index("--dp-address") + 1]
        for spec in engines
        if "--dp-address" in spec.arguments
    }
    taken = {spec.url.removeprefix("http://") for spec in engines}
    assert len(taken) == len(engines)
    assert not taken & addresses
    assert [spec.arguments[:2] for spec in engines] == [
        ("--port", spec.url.rpartition(":")[2]) for spec in engines
    ]
