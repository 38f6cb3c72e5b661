"""The engine process: `python -m engine.process`, started by a service with its configuration on stdin.

One loop: take commands, handle hand-over events, run a step, report. It sleeps only when there is nothing to
run, and wakes for a command or for the transfer threads.
"""

import logging
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import msgspec
import zmq

from engine.config import EngineConfig
from engine.errors import EngineStartError
from engine.ipc import (
    Abort,
    AddRequest,
    Event,
    GroupEnded,
    Progress,
    Shutdown,
    StartFailed,
    StepEvents,
    Withdraw,
    decode_command,
    encode,
)
from engine.pulse import PulseThread
from engine.wake import WakePipe
from processes.child import die_with_parent
from shared_scheduler import GroupError

if TYPE_CHECKING:
    from engine.llm_engine import LLMEngine

logger = logging.getLogger(__name__)

MAX_EMPTY_STEPS = 256
EMPTY_STEP_WAIT_MS = 2
"""A NORMAL engine may need an interval of empty steps before it may prefill; after more than that a step
that finds nothing waits for someone else, such as a reader to let go of blocks."""
IDLE_REPORT_MS = 1000
"""While idle, statistics are sent this often, and time-outs of hand-overs are looked at."""


def main() -> int:
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the service decides
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    process = EngineProcess(config)
    exit_code = 0
    try:
        process.load()
        process.run()
    except EngineStartError as error:
        process.send(StartFailed(str(error)))
        exit_code = 1
    except GroupError as error:
        process.send(GroupEnded(str(error)))
        exit_code = 1
    process.close()
    return exit_code


class EngineProcess:
    """Sockets and loop around one `LLMEngine`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PULL)
        self._commands.connect(config.command_endpoint)
        self._events = self._context.socket(zmq.PUSH)
        self._events.setsockopt(zmq.LINGER, 1000)
        self._events.connect(config.event_endpoint)
        self._pulse = PulseThread(self._context, config.event_endpoint)
        self._wake = WakePipe()
        self._poller = zmq.Poller()
        self._poller.register(self._commands, zmq.POLLIN)
        self._poller.register(self._wake.read_fd, zmq.POLLIN)
        self._is_running = True
        self._engine: LLMEngine | None = None

    def send(self, event: Event) -> None:
        self._events.send(encode(event))

    def load(self) -> None:
        """Build the engine; raises `EngineStartError` with a line that says what to do."""
        self._config.check()
        self.send(Progress("importing torch", 0.05))
        # torch takes two seconds to import: only here, so that a bad configuration fails at once.
        from engine.assembly import build_engine

        self._engine, ready = build_engine(self._config, self._wake.wake, self._report_progress)
        self.send(ready)

    def run(self) -> None:
        """Step until told to shut down."""
        engine = self._require_engine()
        reported_s, num_reported_free = 0.0, -1
        while self._is_running:
            self._take_commands(wait_ms=self._wait_ms())
            outputs = list(engine.poll())
            if engine.takes_step():
                outputs += engine.step()
            now_s = time.monotonic()
            num_free = engine.num_free_blocks
            if outputs or num_free != num_reported_free or (now_s - reported_s) * 1000 >= IDLE_REPORT_MS:
                reported_s, num_reported_free = now_s, num_free
                self.send(StepEvents(tuple(outputs), engine.stats(), engine.take_cache_events()))

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._pulse.close()
        self._commands.close(linger=0)
        self._events.close()
        self._context.term()

    def _require_engine(self) -> "LLMEngine":
        assert self._engine is not None, "load() comes first"
        return self._engine

    def _report_progress(self, stage: str, fraction: float) -> None:
        self.send(Progress(stage, fraction))

    def _wait_ms(self) -> int:
        """How long to sleep: not at all with work at hand, a little when steps keep coming out empty."""
        engine = self._require_engine()
        if not engine.has_work:
            return IDLE_REPORT_MS
        return 0 if engine.num_empty_steps < MAX_EMPTY_STEPS else EMPTY_STEP_WAIT_MS

    def _take_commands(self, wait_ms: int) -> None:
        """Sleep until there is something to do, at most `wait_ms`; carry out every command that is here."""
        engine = self._require_engine()
        self._poller.poll(wait_ms)
        self._wake.clear()
        while True:
            try:
                frame = self._commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            match decode_command(frame):
                case AddRequest() as request:
                    engine.add(request)
                case Abort(request_id, keeps_handover):
                    engine.abort(request_id, keeps_handover=keeps_handover)
                case Withdraw(handover_id):
                    engine.withdraw(handover_id)
                case Shutdown():
                    self._is_running = False


def exit_now(code: int) -> None:
    """Leave without running destructors: transfer libraries may still own threads."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_now(main())
