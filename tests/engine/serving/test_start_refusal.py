"""A service whose engine cannot start says why in one line."""

import subprocess
import sys

import pytest

from processes.child import environment_for_child

pytestmark = pytest.mark.system


def test_a_completion_service_refuses_to_recompute_naming_the_option() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "completion_service", "--port", "0", "--no-stop-preempted-request"],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment_for_child(),
    )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("completion_service: --no-stop-preempted-request: a completion engine")
