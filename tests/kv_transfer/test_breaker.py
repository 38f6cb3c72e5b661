"""A peer that keeps failing is left alone, for longer and longer, and tried again by one session."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.breaker import Breakers
from kv_transfer.settings import TransferSettings
from wire.services import PromptEngineAddress

SETTINGS = TransferSettings(breaker_failures=3, breaker_pause_s=1.0, breaker_max_pause_s=4.0, max_peers=4)
PEER = PromptEngineAddress(engine_id="prompt-0", epoch=1, control_address="tcp://127.0.0.1:7")


class Longest(random.Random):
    """Jitter at its upper end, so that pauses are exact."""

    def uniform(self, a: float, b: float) -> float:
        return b


@pytest.fixture
def breakers() -> Breakers:
    return Breakers(SETTINGS, Longest())


def fail(breakers: Breakers, count: int, now_s: float = 0.0, peer: PromptEngineAddress = PEER) -> None:
    for _ in range(count):
        breakers.trying(peer)
        breakers.failed(peer, "connect_failed: no hello", now_s)


def test_a_few_failures_pause_nothing(breakers: Breakers) -> None:
    fail(breakers, 2)
    assert breakers.refusal(PEER, 0.0) is None
    assert breakers.paused_engines() == []


def test_the_third_failure_in_a_row_pauses_and_says_why_and_until_when(breakers: Breakers) -> None:
    fail(breakers, 3)
    refusal = breakers.refusal(PEER, 0.25)
    assert refusal == ("it failed 3 times in a row (connect_failed: no hello); it is tried again in 0.8 s")
    assert breakers.paused_engines() == ["prompt-0"]


def test_a_read_between_failures_starts_the_count_again(breakers: Breakers) -> None:
    fail(breakers, 2)
    breakers.worked(PEER)
    fail(breakers, 2)
    assert breakers.refusal(PEER, 0.0) is None


@pytest.mark.parametrize(("num_failures", "pause_s"), [(3, 1.0), (4, 2.0), (5, 4.0), (6, 4.0), (5000, 4.0)])
def test_pauses_double_up_to_a_bound(breakers: Breakers, num_failures: int, pause_s: float) -> None:
    fail(breakers, num_failures)
    assert breakers.refusal(PEER, pause_s - 0.01) is not None
    assert breakers.refusal(PEER, pause_s) is None


@given(st.integers(3, 50), st.integers(0, 2**32))
def test_jitter_takes_at_most_half_of_a_pause(num_failures: int, seed: int) -> None:
    breakers = Breakers(SETTINGS, random.Random(seed))
    fail(breakers, num_failures)
    longest_s = min(4.0, 2.0 ** (num_failures - 3))
    assert breakers.refusal(PEER, longest_s / 2 - 0.01) is not None
    assert breakers.refusal(PEER, longest_s) is None


def test_after_the_pause_one_session_is_tried_and_the_others_wait_for_its_end(breakers: Breakers) -> None:
    fail(breakers, 3)
    assert breakers.refusal(PEER, 1.0) is None
    breakers.trying(PEER)
    assert "tried again now" in (breakers.refusal(PEER, 1.0) or "")
    breakers.failed(PEER, "peer_lost: gone", 1.0)
    assert "4 times in a row (peer_lost: gone)" in (breakers.refusal(PEER, 2.9) or "")
    breakers.trying(PEER)
    breakers.worked(PEER)
    assert breakers.refusal(PEER, 3.0) is None


def test_a_restarted_engine_starts_with_a_clean_record(breakers: Breakers) -> None:
    fail(breakers, 9)
    restarted = PromptEngineAddress(engine_id="prompt-0", epoch=2, control_address=PEER.control_address)
    assert breakers.refusal(restarted, 0.0) is None


def test_memory_of_failed_peers_is_limited(breakers: Breakers) -> None:
    for epoch in range(100):
        peer = PromptEngineAddress(engine_id="p", epoch=epoch, control_address="tcp://127.0.0.1:7")
        fail(breakers, 3, peer=peer)
    assert len(breakers.paused_engines()) == SETTINGS.max_peers
