"""The simulator of pairing: deterministic, complete, and it tells policies apart."""

import pytest

from benchmarks.routing import PREFILL_TOKENS_PER_S, Outcome, Request, Simulation, requests_of
from benchmarks.traces import BLOCK_TOKENS
from proxy.pairing import PairingRules
from proxy.role_policies import PolicyName

REQUESTS = requests_of("mooncake_conversation_blocks", 1_000, 4, 0.9, seed=1)


def outcome_of(prompt: PolicyName) -> Outcome:
    rules = PairingRules(prompt=prompt, completion="least_tokens")
    return Simulation(rules, num_prompt=4, num_completion=2, seed=1).run(REQUESTS)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_a_lone_prompt_takes_its_time_and_its_repetition_takes_nothing() -> None:
    lone = Request(0.0, (1, 2), 3)
    again = Request(100.0, (1, 2), 3)
    outcome = Simulation(PairingRules(), 1, 1, seed=1).run([lone, again])
    prefill_s = 2 * BLOCK_TOKENS / PREFILL_TOKENS_PER_S
    assert outcome.first_token_s == pytest.approx([prefill_s, 1 / PREFILL_TOKENS_PER_S])
    assert outcome.token_s == pytest.approx([0.0205, 0.0205])


def test_every_answer_ends_and_a_second_run_is_the_same() -> None:
    outcome = outcome_of("power_of_two")
    assert len(outcome.token_s) == len(outcome.first_token_s) == len(REQUESTS)
    assert outcome == outcome_of("power_of_two")


def test_policies_that_look_at_queues_or_prefixes_beat_round_robin() -> None:
    blind, by_load, by_prefix = (outcome_of(name) for name in ("round_robin", "least_tokens", "prefix"))
    assert mean(by_load.first_token_s) < mean(blind.first_token_s)
    assert mean(by_prefix.first_token_s) < mean(by_load.first_token_s)
    assert by_prefix.cached_share > 1.5 * by_load.cached_share
