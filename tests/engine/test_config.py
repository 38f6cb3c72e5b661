"""Settings of a group that contradict each other are refused before anything is loaded."""

from dataclasses import replace
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import EngineStartError

RANK = EngineConfig(
    role="normal",
    engine_id="e",
    epoch=1,
    model="m",
    command_endpoint="ipc://c",
    event_endpoint="ipc://e",
    dp_size=2,
    dp_rank=1,
    dp_address="127.0.0.1:29500",
)


@pytest.mark.parametrize("address", ["127.0.0.1:29500", "[::1]:1", "rank-0.engines:65535"])
def test_a_rank_of_a_group_is_accepted(address: str) -> None:
    replace(RANK, dp_address=address).check()


@pytest.mark.parametrize("rank", [2, -1])
def test_a_rank_outside_its_group_is_refused(rank: int) -> None:
    with pytest.raises(EngineStartError, match=f"--dp-rank {rank} is no rank of --dp-size 2"):
        replace(RANK, dp_rank=rank).check()


@pytest.mark.parametrize("address", [None, "", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", ":29500", "h:0"])
def test_a_group_needs_an_address(address: str | None) -> None:
    with pytest.raises(EngineStartError, match=r"--dp-size 2 needs --dp-address HOST:PORT"):
        replace(RANK, dp_address=address).check()


def test_only_normal_engines_step_alike() -> None:
    with pytest.raises(EngineStartError, match="--dp-size 2 needs --engine normal, this is completion"):
        replace(RANK, role="completion").check()


def test_a_completion_engine_has_no_waiting_policy_but_the_estimate() -> None:
    alone = replace(RANK, dp_size=1, dp_rank=0)
    completion = replace(alone, role="completion", waiting_policy="lpm")
    with pytest.raises(EngineStartError, match="--waiting-policy lpm: nothing waits for prefill"):
        completion.check()
    assert [replace(alone, role=role).has_admission_estimate for role in ("completion", "normal")] == [
        True,
        False,
    ]
    assert replace(alone, admission_estimate=True).has_admission_estimate


@pytest.mark.parametrize(("method", "draft_model"), [("model", None), ("ngram", "small"), ("off", "small")])
def test_a_draft_model_and_its_method_belong_together(method: Any, draft_model: str | None) -> None:
    alone = replace(RANK, dp_size=1, dp_rank=0)
    with pytest.raises(EngineStartError, match=f"--speculative {method} with --draft-model {draft_model}"):
        replace(alone, speculative=method, draft_model=draft_model).check()
    replace(alone, speculative="model", draft_model="small").check()
