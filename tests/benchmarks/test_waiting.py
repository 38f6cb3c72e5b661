import pytest

from benchmarks.waiting import ordering_times_us
from shared_scheduler import WaitingPolicy


@pytest.mark.parametrize("policy", WaitingPolicy)
def test_every_policy_is_timed(policy: WaitingPolicy) -> None:
    """No figure is asserted: a benchmark is never a timed test."""
    assert len(ordering_times_us(policy, num_waiting=16, num_steps=3)) == 3
