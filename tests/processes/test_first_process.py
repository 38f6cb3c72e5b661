"""SIGTERM while the first process of a container is still starting."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from processes.first_process import EXIT_CODE

IN_A_PID_NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child"]
HELD = """
import os, runpy, sys
from processes import first_process

program, end_when_told = sys.argv[1], first_process.end_when_told

def end_when_told_and_wait():
    end_when_told()
    imported = sorted({program + ".main", "fastapi", "torch"} & sys.modules.keys())
    print("can end as process", os.getpid(), imported, flush=True)
    sys.exit(sys.stdin.read())

first_process.end_when_told = end_when_told_and_wait
runpy.run_module(program, run_name="__main__", alter_sys=True)
"""
"""`python -m PROGRAM` that goes no further than its first call, for as long as nothing comes from stdin."""


def can_make_pid_namespaces() -> bool:
    try:
        return subprocess.run([*IN_A_PID_NAMESPACE, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.system
@pytest.mark.skipif(not can_make_pid_namespaces(), reason="no process namespaces can be made here")
@pytest.mark.parametrize("program", ["proxy", "prompt_service", "completion_service", "launcher"])
def test_a_container_that_is_told_to_end_while_it_starts_ends_at_once(program: str) -> None:
    """Before it imports what it is, let alone serves: its exit code would then be 0."""
    environment = {**os.environ, f"TANDEM_{program.removesuffix('_service').upper()}_PORT": "0"}
    command = [*IN_A_PID_NAMESPACE, sys.executable, "-c", HELD, program]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as unshare:
        assert unshare.stdout is not None
        assert unshare.stdout.readline() == "can end as process 1 []\n"
        (first,) = psutil.Process(unshare.pid).children()
        first.send_signal(signal.SIGTERM)
        assert unshare.wait(60.0) == EXIT_CODE
