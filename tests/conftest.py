"""How the suite is divided among pytest-xdist workers (`-n 2`)."""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

STACKS = ("tests/system/", "tests/k8s/", "tests/browser/", "tests/engine/tensor_parallel/")
"""Tests of real processes. Two stacks at a time would starve each other on two cores."""


class OneWorkerForStacks(LoadScopeScheduling):
    """Tests of real processes follow one another in one worker; of the others, each file stays together."""

    def _split_scope(self, nodeid: str) -> str:
        return "stacks" if nodeid.startswith(STACKS) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneWorkerForStacks:
    return OneWorkerForStacks(config, log)
