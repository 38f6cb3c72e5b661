"""The parent of `--workers N`: it holds the listening socket, and keeps N processes that serve it alive.

1. start   every worker inherits the listening socket: a connection waits for whoever is free, not for one
2. run     a worker that is killed is started again, after a pause that grows while that happens at once
3. stop    SIGTERM goes to all workers, which drain; the status is 0 when theirs are; so does a second one

A worker that ends by itself before it has served, as with a wrong setting or model, ends all.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from processes.child import environment_for_child
from proxy.workers.peers import socket_path
from proxy.workers.shared_key_use import create_table

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 5.0
STEADY_S = 10.0
"""A worker that has run so long begins with the shortest pause again."""

Command = Callable[[int, int, Path], Sequence[str]]
"""A worker's arguments by its number, the listening socket's descriptor, and the directory that all share."""


def run_workers(num_workers: int, listening: socket.socket, command: Command) -> int:
    """Serve until a signal has stopped all workers; returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="tandem-proxy-") as directory:
        create_table(Path(directory))
        return asyncio.run(_Workers(num_workers, listening, Path(directory), command).run())


class _Workers:
    def __init__(self, num_workers: int, listening: socket.socket, directory: Path, command: Command) -> None:
        self._num_workers = num_workers
        self._listening = listening
        self._directory = directory
        self._command = command
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._status = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for one in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(one, self._stop, one)
        async with asyncio.TaskGroup() as group:
            for number in range(self._num_workers):
                group.create_task(self._keep(number))
        return self._status

    def _stop(self, number: int) -> None:
        self._stopping.set()
        for process in self._processes.values():
            if process.returncode is None:
                process.send_signal(number)

    async def _keep(self, number: int) -> None:
        loop, pause_s = asyncio.get_running_loop(), FIRST_PAUSE_S
        while not self._stopping.is_set():
            started_s = loop.time()
            status = await self._run_one(number)
            if self._stopping.is_set():
                self._status = self._status or abs(status)
                return
            if status > 0 and not self._has_served(number):
                self._status = status
                self._stop(signal.SIGTERM)
                return
            pause_s = FIRST_PAUSE_S if loop.time() - started_s > STEADY_S else min(2 * pause_s, MAX_PAUSE_S)
            logger.warning("worker %d ended with status %d: starting it again", number, status)
            try:
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
            except TimeoutError:
                pass

    async def _run_one(self, number: int) -> int:
        socket_path(self._directory, number).unlink(missing_ok=True)
        descriptor = self._listening.fileno()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *self._command(number, descriptor, self._directory),
            pass_fds=(descriptor,),
            env=environment_for_child(),
            # A terminal's Ctrl-C reaches every process of a group: the parent alone passes it on.
            process_group=0,
        )
        self._processes[number] = process
        if self._stopping.is_set():
            process.send_signal(signal.SIGTERM)
        return await process.wait()

    def _has_served(self, number: int) -> bool:
        return os.path.exists(socket_path(self._directory, number))
