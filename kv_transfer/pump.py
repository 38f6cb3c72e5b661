"""One thread that owns sockets and a transport, with a mailbox for the engine's calls."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import zmq

logger = logging.getLogger(__name__)

Clock: TypeAlias = Callable[[], float]
"""Monotonic seconds."""

Command: TypeAlias = Callable[[], None]

STOP_TIMEOUT_S = 10.0

IDLE_S = 0.1
"""Longest wait of a pump; deadlines are kept to this precision."""

BUSY_S = 0.0001
"""Wait between polls of a transport that has no socket to wait for."""


class Mailbox:
    """Commands from any thread to the pump, which a byte in a pipe wakes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._commands: deque[Command] = deque()
        self._closed = False
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)

    def post(self, command: Command) -> None:
        """Dropped once closed."""
        with self._lock:
            if self._closed:
                return
            self._commands.append(command)
            if len(self._commands) == 1:
                os.write(self._write_fd, b"\0")

    def drain(self) -> list[Command]:
        """All commands so far, in the order they were posted."""
        with self._lock:
            commands = list(self._commands)
            self._commands.clear()
            if commands:
                os.read(self.read_fd, 16)
            return commands

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self.read_fd)
            os.close(self._write_fd)


class Pump:
    """Calls `turn` until stopped; what a turn or a command raises is logged, counted and survived."""

    def __init__(
        self,
        name: str,
        set_up: Callable[[], None],
        turn: Callable[[], float],
        tear_down: Callable[[], None],
        on_error: Callable[[], None],
    ) -> None:
        """`turn` does what is ready and returns how many seconds the next one may wait for a socket.

        All four are called in the thread, `tear_down` also after a failed `set_up`.
        """
        self._set_up, self._turn, self._tear_down, self._on_error = set_up, turn, tear_down, on_error
        self._mailbox = Mailbox()
        self._stopping = False
        self._stopped = False
        self._started = threading.Event()
        self._start_error: Exception | None = None
        self.poller = zmq.Poller()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Returns when `set_up` is done; raises what it raised."""
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            self.stop()
            raise self._start_error

    def post(self, command: Command) -> None:
        """Run `command` in the thread; dropped once stopped."""
        self._mailbox.post(command)

    def stop(self) -> None:
        """Runs what was posted before, tears down, and joins. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self._mailbox.post(self._set_stopping)
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("thread %s did not stop in %s s", self._thread.name, STOP_TIMEOUT_S)
        else:
            self._mailbox.close()

    def _set_stopping(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            self.poller.register(self._mailbox.read_fd, zmq.POLLIN)
            self._set_up()
        except Exception as error:
            self._start_error = error
            self._stopping = True
        self._started.set()
        timeout_s = 0.0
        while not self._stopping:
            if timeout_s < 0.001:
                time.sleep(timeout_s)
            self.poller.poll(int(timeout_s * 1000))
            for command in self._mailbox.drain():
                self._guard(command)
            timeout_s = self._guarded_turn()
        self._guard(self._tear_down)

    def _guarded_turn(self) -> float:
        try:
            return self._turn()
        except Exception:
            self._on_error()
            logger.exception("%s: a turn failed", self._thread.name)
            return IDLE_S

    def _guard(self, command: Command) -> None:
        try:
            command()
        except Exception:
            self._on_error()
            logger.exception("%s: a command failed", self._thread.name)
