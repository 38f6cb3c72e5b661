"""What it costs engines to step alike: one collective of a step, and waking a sleeping group.

`python -m benchmarks.group [--json FILE] [--size N]`: ranks are processes of their own, joined over loopback
as engines are. Idle cores decide these numbers: a rank that must wait for a core waits milliseconds.
"""

import os
import socket
import subprocess
import sys
import threading
import time

import numpy as np

from benchmarks.report import Report, argument_parser
from engine.group import EngineGroup
from engine.rendezvous import GroupPlace, join_group

NUM_STEPS = 3000
NUM_WAKES = 200
WARM_UP = 50
SLEEP_S = 0.01


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--size", type=int, default=2, help="ranks of the group")
    parser.add_argument("--rank", type=int, default=0, help="set by the benchmark itself")
    parser.add_argument("--port", type=int, default=0, help="set by the benchmark itself")
    arguments = parser.parse_args()
    if arguments.rank > 0:
        member = Member(arguments.rank, arguments.size, arguments.port)
        member.steps()
        member.wakes()
        os._exit(0)
    port = _free_port()
    others = [_start(rank, arguments.size, port) for rank in range(1, arguments.size)]
    report = Report("group")
    case = f"{arguments.size} ranks"
    member = Member(0, arguments.size, port)
    wall_s, cpu_s = member.steps()
    _add(report, case, "collective of a step", wall_s)
    report.add(case, "collective of a step, CPU of a rank", cpu_s * 1e6, "µs")
    _add(report, case, "waking a sleeping group", member.wakes())
    report.finish(arguments.json)
    for other in others:
        other.wait(timeout=10)


class Member:
    """One rank; all run the same methods in the same order."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        self._rank = rank
        self._woken = threading.Event()
        place = GroupPlace(rank=rank, size=size, host="127.0.0.1", port=port)
        self._group: EngineGroup = join_group(place, {}, wake=self._woken.set, report=lambda *_: None)

    def steps(self) -> tuple[list[float], float]:
        """Wall time of each step's collective, and the process's CPU time per step."""
        wall_s, cpu_s = [], 0.0
        for step_id in range(WARM_UP + NUM_STEPS):
            if step_id == WARM_UP:
                cpu_s = time.process_time()
            started_s = time.perf_counter()
            self._group.begin_step(step_id, False, is_empty=False, has_work=step_id < WARM_UP + NUM_STEPS - 1)
            wall_s.append(time.perf_counter() - started_s)
        return wall_s[WARM_UP:], (time.process_time() - cpu_s) / NUM_STEPS

    def wakes(self) -> list[float]:
        """From a rank having work until all step."""
        wall_s = []
        for step_id in range(NUM_WAKES):
            if self._rank == 0:
                time.sleep(SLEEP_S)  # the others fall asleep
            started_s = time.perf_counter()
            while not self._group.takes_step(self._rank == 0):
                self._woken.wait(1.0)
                self._woken.clear()
            wall_s.append(time.perf_counter() - started_s)
            self._group.begin_step(step_id, False, is_empty=True, has_work=False)
        return wall_s


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(rank: int, size: int, port: int) -> "subprocess.Popen[bytes]":
    arguments = ["--rank", str(rank), "--size", str(size), "--port", str(port)]
    return subprocess.Popen([sys.executable, "-m", "benchmarks.group", *arguments])


def _add(report: Report, case: str, metric: str, wall_s: list[float]) -> None:
    for name, percentile in (("p10", 10), ("median", 50), ("p99", 99)):
        report.add(case, f"{metric}, {name}", float(np.percentile(wall_s, percentile)) * 1e6, "µs")


if __name__ == "__main__":
    main()
