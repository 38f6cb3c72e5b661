"""Rank 0's side of the other ranks: their processes, what they are sent, and how their end is noticed.

1. started   each process was given its configuration and a descriptor of its slice of the KV pool
2. here      all run; rank 0 connects the collectives with them
3. loaded    steps flow
4. lost      a process ended or said that it cannot go on: every later call raises, the engine ends
"""

import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec
import zmq

from engine.errors import TensorParallelError
from engine.tensor_parallel.messages import (
    Failed,
    Here,
    Loaded,
    RankConfig,
    Step,
    Stop,
    ToRank,
    decode_to_first,
    encode,
)
from engine.wake import WakePipe
from processes.child import environment_for_child
from shared_scheduler import GroupError

logger = logging.getLogger(__name__)

EXPLAIN_WAIT_S = 1.0
"""How long a broken collective waits to learn which rank has ended."""
STOP_WAIT_S = 3.0
LOAD_WAIT_S = 600.0
"""How long rank 0, which has loaded its part, waits for the others."""


class RankProcesses:
    """The ranks beyond the first. `wake` is called from a thread when one is lost.

    Steps are sent by one thread at a time; everything else may be called from any.
    """

    def __init__(self, wake: Callable[[], None], directory: str | None = None) -> None:
        self._wake = wake
        self._directory = tempfile.TemporaryDirectory(prefix="tandem-tp-", dir=directory)
        self._context = zmq.Context()
        self._reports = self._context.socket(zmq.PULL)
        self._reports.bind(self.report_endpoint)
        self._steps: list[zmq.Socket[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._changed = threading.Condition()
        self._here: set[int] = set()
        self._loaded: set[int] = set()
        self._lost: str | None = None
        self._stop = WakePipe()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def report_endpoint(self) -> str:
        return f"ipc://{self._directory.name}/reports"

    def step_endpoint(self, rank: int) -> str:
        return f"ipc://{self._directory.name}/steps-{rank}"

    @property
    def process_ids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def start(self, configs: Sequence[RankConfig]) -> None:
        """In a thread that lives as long as the engine: the kernel ends a child with its thread."""
        for config in configs:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(config.step_endpoint)
            self._steps.append(socket)
            self._processes.append(_spawn(config))
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._thread.start()

    def wait_until_here(self) -> None:
        self._wait_for(self._here)

    def wait_until_loaded(self) -> None:
        """`TensorParallelError` if a rank cannot start, with what it said, or is not there in time."""
        self._wait_for(self._loaded)

    def send(self, step: Step) -> None:
        self.check()
        self._send(step)

    def check(self) -> None:
        """`GroupError` if a rank is lost."""
        if self._lost is not None:
            raise GroupError(self._lost)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """A collective that broke says which rank is gone, if that is known in time."""
        try:
            yield
        except GroupError as error:
            with self._changed:
                self._changed.wait_for(lambda: self._lost is not None, EXPLAIN_WAIT_S)
            raise GroupError(self._lost or str(error)) from error

    def close(self) -> None:
        """End every process. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop.wake()
        if self._thread is not None:
            self._thread.join()
        if self._lost is None:
            with suppress(GroupError):  # who does not take it is killed
                self._send(Stop())
        until_s = time.monotonic() + (STOP_WAIT_S if self._lost is None else 0.0)
        for process in self._processes:
            try:
                process.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for socket in (*self._steps, self._reports):
            socket.close(linger=0)
        self._context.term()
        self._directory.cleanup()

    def _send(self, message: ToRank) -> None:
        frame = encode(message)
        for socket in self._steps:
            try:
                socket.send(frame, zmq.NOBLOCK)
            except zmq.Again as error:  # its queue is full: it has taken nothing for a thousand steps
                raise GroupError("a rank does not take its steps") from error

    def _wait_for(self, ranks: set[int]) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._lost is not None or len(ranks) == len(self._processes), LOAD_WAIT_S
            )
            missing = set(range(1, len(self._processes) + 1)) - ranks
        if self._lost is not None:
            raise TensorParallelError(self._lost)
        if missing:
            names = ", ".join(f"rank {rank}" for rank in sorted(missing))
            raise TensorParallelError(
                f"{names} of --tp {len(self._processes) + 1} did not start within {LOAD_WAIT_S:g} s; "
                "see what its log says last"
            )

    # In the watching thread

    def _watch(self) -> None:
        poller = zmq.Poller()
        poller.register(self._reports, zmq.POLLIN)
        poller.register(self._stop.read_fd, zmq.POLLIN)
        ends = {os.pidfd_open(process.pid): rank for rank, process in enumerate(self._processes, 1)}
        for fd in ends:
            poller.register(fd, zmq.POLLIN)
        try:
            while self._lost is None:
                ready = dict(poller.poll())
                if self._stop.read_fd in ready:
                    return
                ended = {ends[fd]: self._processes[ends[fd] - 1].wait() for fd in ends.keys() & ready.keys()}
                # A rank that was killed is why the others report that one is lost; one that ended by
                # itself has said why.
                self._note_ends({rank: code for rank, code in ended.items() if code < 0})
                self._take_reports()
                self._note_ends(ended)
        finally:
            for fd in ends:
                os.close(fd)

    def _note_ends(self, codes: dict[int, int]) -> None:
        for rank, code in codes.items():
            self._lose(f"rank {rank} of the engine has ended with code {code}")

    def _take_reports(self) -> None:
        while self._reports.poll(0):
            message = decode_to_first(self._reports.recv())
            with self._changed:
                match message:
                    case Here(rank):
                        self._here.add(rank)
                    case Loaded(rank):
                        self._loaded.add(rank)
                    case Failed():
                        self._lose(message.message)
                self._changed.notify_all()

    def _lose(self, why: str) -> None:
        with self._changed:
            if self._lost is None:
                self._lost = why
                self._changed.notify_all()
        self._wake()


def _spawn(config: RankConfig) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.tensor_parallel.worker"],
        stdin=subprocess.PIPE,
        # torch logs every lost connection with its native stack; the rank says it in one line.
        env={"TORCH_CPP_LOG_LEVEL": "ERROR", **environment_for_child()},
        pass_fds=(config.pool_fd,),
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(config))
    process.stdin.close()
    return process
