"""Children that never outlive their parent, even when the parent is killed."""

import ctypes
import os
import signal
import sys

PARENT_PID_VARIABLE = "TANDEM_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def environment_for_child() -> dict[str, str]:
    """The environment a child is started with, so that its `die_with_parent` knows whom to watch."""
    return {**os.environ, PARENT_PID_VARIABLE: str(os.getpid())}


def die_with_parent(death_signal: signal.Signals) -> None:
    """Ask the kernel for `death_signal` when the process that started this one ends.

    Does nothing when this process was not started through `environment_for_child`, or outside Linux.
    """
    parent_pid = os.environ.pop(PARENT_PID_VARIABLE, None)
    if parent_pid is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(death_signal))
    if os.getppid() != int(parent_pid):  # the parent ended before the line above took effect
        os.kill(os.getpid(), death_signal)
