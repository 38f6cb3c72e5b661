"""How the suite is divided among pytest-xdist workers (`-n 2`); no test depends on the speed of a machine."""

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

STACKS = (
    "tests/system/",
    "tests/k8s/test_cluster.py",
    "tests/k8s/test_rendered_processes.py",
    "tests/browser/",
    "tests/engine/tensor_parallel/",
)
"""Tests of real processes. Two stacks at a time would starve each other on two cores."""
PATIENT = ("tests/system/test_states.py", "tests/system/test_mismatch.py")
"""Stacks that only compare answers, so that the other worker may run them: it has the time."""


class OneWorkerForStacks(LoadScopeScheduling):
    """Tests of real processes follow one another in one worker; of the others, each file stays together."""

    def _split_scope(self, nodeid: str) -> str:
        is_stack = nodeid.startswith(STACKS) and not nodeid.startswith(PATIENT)
        return "stacks" if is_stack else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneWorkerForStacks:
    return OneWorkerForStacks(config, log)


settings.register_profile(
    "tandem",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("tandem")
