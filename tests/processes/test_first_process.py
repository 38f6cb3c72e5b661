"""SIGTERM while the first process of a container is still starting."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from processes.first_process import EXIT_CODE

IN_A_PID_NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child"]


def can_make_pid_namespaces() -> bool:
    try:
        return subprocess.run([*IN_A_PID_NAMESPACE, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


def has_handler(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.system
@pytest.mark.skipif(not can_make_pid_namespaces(), reason="no process namespaces can be made here")
@pytest.mark.parametrize("program", ["proxy", "prompt_service", "completion_service", "launcher"])
def test_a_container_that_is_told_to_end_while_it_starts_ends_at_once(program: str) -> None:
    """Long before it serves: its exit code would then be 0."""
    environment = {**os.environ, f"TANDEM_{program.removesuffix('_service').upper()}_PORT": "0"}
    command = [*IN_A_PID_NAMESPACE, sys.executable, "-m", program]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as unshare:
        first = first_process_of(unshare.pid)
        while not has_handler(first.pid, signal.SIGTERM):
            time.sleep(0.01)
        first.send_signal(signal.SIGTERM)
        assert unshare.wait(60.0) == EXIT_CODE


def first_process_of(pid: int) -> psutil.Process:
    while True:
        for child in psutil.Process(pid).children():
            return child
        time.sleep(0.01)
