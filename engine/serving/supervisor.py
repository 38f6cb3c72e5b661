"""Owns the engine process of a service.

1. loading   the process was started; it reports its stages; requests are refused with 503
2. ready     requests flow
3. lost      the process ended, or was ended because it fell silent: every open request fails at once, then
             1. again with a new epoch
4. failed    the engine said it cannot start, or died too often while loading: the service ends
5. draining  nothing new is taken; what runs may end within a grace, and a restarted engine takes nothing
6. stopped   the service is shutting down
"""

import asyncio
import logging
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import zmq.asyncio

from engine.config import EngineConfig
from engine.ipc import EngineStats, GroupEnded, Progress, Ready, StartFailed, StepEvents
from engine.serving.cache_log import CacheLog
from engine.serving.engine_link import EngineLink
from engine.serving.errors import EngineUnavailable, ServiceStartError
from engine.serving.settings import EngineServiceSettings
from engine.serving.signals import ScalingSignals
from processes.child import environment_for_child
from wire.services import EngineRole

logger = logging.getLogger(__name__)

State = Literal["loading", "ready", "draining", "lost", "failed", "stopped"]

MAX_FAILED_STARTS = 3
SHUTDOWN_WAIT_S = 5.0
MAX_SILENT_S = 7
"""A ready engine sends something every second, whatever it does; one that does not is ended."""
LAST_EVENTS_S = 0.1
"""How long events of a process that has ended may take to arrive."""


class EngineSupervisor:
    """Starts the engine, keeps its last known state, restarts it when it dies."""

    def __init__(self, settings: EngineServiceSettings, role: EngineRole) -> None:
        self._settings = settings
        self._role = role
        self._engine_id = f"{role}-{uuid.uuid4().hex[:12]}"
        self._link: EngineLink | None = None
        self.state: State = "loading"
        self.progress = Progress("starting", 0.0)
        self.engine: Ready | None = None
        self.config: EngineConfig | None = None
        self.stats: EngineStats | None = None
        self.cache_log = CacheLog()
        self.signals = ScalingSignals(time.monotonic)
        self.num_restarts = 0
        self._num_events = 0
        self.on_drain: Callable[[], None] = _nothing
        """Called when draining begins."""
        self._leaves_at_s = 0.0
        self._heard = asyncio.Event()
        """The engine has said how it is since this was cleared."""
        self._reason: str | None = None
        """Why the engine ends, where its exit code does not say."""

    @property
    def zone(self) -> str | None:
        return self._settings.zone

    @property
    def link(self) -> EngineLink:
        """The link to a ready engine; raises `EngineUnavailable` in any other state."""
        if self._link is None or self.state != "ready":
            raise EngineUnavailable(
                f"the engine is {self.state} ({self.progress.stage})", code=f"engine_{self.state}"
            )
        return self._link

    @property
    def num_open_requests(self) -> int:
        return 0 if self._link is None else self._link.num_open_streams

    @property
    def holds_handovers(self) -> bool:
        """Does this kind of engine keep computed prompts for others?"""
        return self._role == "prompt"

    @property
    def num_held_handovers(self) -> int:
        """Prompt engine: computed prompts that a completion engine may still read."""
        return self.stats.num_handovers if self.holds_handovers and self.stats is not None else 0

    async def until_idle(self) -> None:
        """Return once no request is open and no hand-over is held for a reader: released, or expired."""
        while self.num_open_requests or self.num_held_handovers:
            self._heard.clear()
            await self._heard.wait()

    @property
    def grace_left_s(self) -> float:
        """How long what runs in a draining service may go on."""
        return max(0.0, self._leaves_at_s - time.monotonic())

    def drain(self, grace_s: float) -> None:
        """Refuse new requests; those that run go on, for `grace_s`."""
        if self.state in ("loading", "ready", "lost"):
            self.state = "draining"
            self._leaves_at_s = time.monotonic() + grace_s
            self.on_drain()

    def withdraw_handover(self, handover_id: str) -> None:
        """Prompt engine: let go of a hand-over that nobody will take. Also while draining; idempotent."""
        if self._link is not None:
            self._link.withdraw(handover_id)

    async def run(self) -> None:
        """Keep an engine running until cancelled; raises `ServiceStartError` when that is hopeless."""
        num_failed_starts = 0
        context = zmq.asyncio.Context()
        try:
            while self.state != "draining":
                became_ready = await self._run_one_engine(context)
                is_failed_start = not became_ready and self._reason is None
                num_failed_starts = num_failed_starts + 1 if is_failed_start else 0
                if num_failed_starts >= MAX_FAILED_STARTS:
                    raise ServiceStartError(
                        f"the engine process died {num_failed_starts} times while loading; "
                        "its own messages above say why"
                    )
                self.num_restarts += 1
        except ServiceStartError:
            self.state = "failed"
            raise
        finally:
            context.destroy(linger=0)

    async def _run_one_engine(self, context: zmq.asyncio.Context) -> bool:
        """One engine process from start to end; True if it ever became ready."""
        directory = Path(tempfile.mkdtemp(prefix="tandem-"))
        # Nanoseconds since the epoch: larger at every start, on a restarted machine too.
        epoch = time.time_ns()
        commands, events = f"ipc://{directory}/commands", f"ipc://{directory}/events"
        self.config = config = self._settings.engine_config(
            self._role, self._engine_id, epoch, commands, events
        )
        self._set_loading()
        self.cache_log.restart(epoch)
        link = self._link = EngineLink(context, commands, events, self.signals)
        process = await _spawn(config)
        try:
            exit_code = await self._follow(process, link)
            became_ready = self.engine is not None
            reason = f"ended with code {exit_code}" + (f": {self._reason}" if self._reason else "")
            if self.state == "draining":
                logger.info("engine process %d %s", process.pid, reason)
            else:
                self.state = "lost"
                logger.error("engine process %d %s", process.pid, reason)
            link.fail_all(f"the engine process {reason}")
            return became_ready
        finally:
            await _end(process, link)
            link.close()
            shutil.rmtree(directory, ignore_errors=True)

    def _set_loading(self) -> None:
        if self.state != "draining":
            self.state = "loading"
        self.engine = None
        self.stats = None
        self._reason = None
        self.progress = Progress("starting", 0.0)

    async def _follow(self, process: asyncio.subprocess.Process, link: EngineLink) -> int:
        """Handle the engine's events until it ends; returns its exit code."""
        watching = asyncio.create_task(self._end_when_silent(process))
        exited = asyncio.create_task(process.wait())
        receiving: asyncio.Task[None] = asyncio.create_task(self._receive_events(link))
        try:
            await asyncio.wait((exited, receiving), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((receiving,), timeout=LAST_EVENTS_S)
            if receiving.done():
                receiving.result()  # a failed start is raised here
            return await exited
        finally:
            for task in (watching, receiving, exited):
                task.cancel()

    async def _end_when_silent(self, process: asyncio.subprocess.Process) -> None:
        """Kill an engine that sends nothing although it was ready: stopped, or stuck beyond help."""
        num_silent_s = 0
        while num_silent_s < MAX_SILENT_S:
            num_events = self._num_events
            await asyncio.sleep(1.0)
            is_silent = self.engine is not None and self._num_events == num_events
            num_silent_s = num_silent_s + 1 if is_silent else 0
        self._reason = f"it was silent for {MAX_SILENT_S} s and was killed"
        process.kill()

    async def _receive_events(self, link: EngineLink) -> None:
        while True:
            event = await link.receive()
            self._num_events += 1
            match event:
                case StepEvents():
                    self.on_stats(event.stats)
                    self.cache_log.add(event.cache_events)
                case Progress():
                    self.progress = event
                case Ready():
                    self._on_ready(event)
                case GroupEnded():
                    self._reason = event.message
                case StartFailed():
                    raise ServiceStartError(event.message)

    def on_stats(self, stats: EngineStats) -> None:
        """What the engine says of itself after a step, and every second while it is idle."""
        self.stats = stats
        self.signals.on_stats(stats)
        self._heard.set()

    def _on_ready(self, ready: Ready) -> None:
        self.engine = ready
        self.stats = ready.stats
        self.progress = Progress("ready", 1.0)
        if self.state == "loading":
            self.state = "ready"
        logger.info(
            "engine ready: model %s, %s kernels, transport %s, %d usable blocks",
            ready.model,
            ready.kernels,
            ready.transport,
            ready.stats.num_usable_blocks,
        )


def _nothing() -> None:
    pass


async def _spawn(config: EngineConfig) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "engine.process",
        stdin=asyncio.subprocess.PIPE,
        # torch logs every lost connection with its native stack; the engine says it in one line.
        env={"TORCH_CPP_LOG_LEVEL": "ERROR", **environment_for_child()},
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(config))
    process.stdin.close()
    return process


async def _end(process: asyncio.subprocess.Process, link: EngineLink) -> None:
    """Ask the engine to end, then make it; nothing survives this call."""
    if process.returncode is not None:
        return
    link.request_shutdown()
    try:
        async with asyncio.timeout(SHUTDOWN_WAIT_S):
            await process.wait()
    except (TimeoutError, asyncio.CancelledError):
        process.kill()
        await process.wait()
