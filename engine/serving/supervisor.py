"""Owns the engine process of a service.

1. loading   the process was started; it reports its stages; requests are refused with 503
2. ready     requests flow
3. lost      the process ended: every open request fails at once, then 1. again with a new epoch
4. failed    the engine said it cannot start, or died too often while loading: the service ends
5. stopped   the service is shutting down
"""

import asyncio
import logging
import shutil
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Literal

import msgspec
import zmq.asyncio

from engine.config import EngineConfig
from engine.ipc import EngineStats, Progress, Ready, StartFailed, StepEvents
from engine.serving.engine_link import EngineLink
from engine.serving.errors import EngineUnavailable, ServiceStartError
from engine.serving.settings import EngineServiceSettings
from processes.child import environment_for_child
from wire.services import EngineRole

logger = logging.getLogger(__name__)

State = Literal["loading", "ready", "draining", "lost", "failed", "stopped"]

MAX_FAILED_STARTS = 3
SHUTDOWN_WAIT_S = 5.0


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
        self.num_restarts = 0

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

    def drain(self) -> None:
        """Refuse new requests; those that run go on."""
        if self.state in ("loading", "ready", "lost"):
            self.state = "draining"

    async def run(self) -> None:
        """Keep an engine running until cancelled; raises `ServiceStartError` when that is hopeless."""
        num_failed_starts = 0
        context = zmq.asyncio.Context()
        try:
            while self.state != "draining":
                became_ready = await self._run_one_engine(context)
                num_failed_starts = 0 if became_ready else num_failed_starts + 1
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
        link = self._link = EngineLink(context, commands, events)
        process = await _spawn(config)
        try:
            exit_code = await self._follow(process, link)
            became_ready = self.engine is not None
            if self.state != "draining":
                self.state = "lost"
            logger.error("engine process %d ended with code %d", process.pid, exit_code)
            link.fail_all(f"the engine process ended with code {exit_code}")
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
        self.progress = Progress("starting", 0.0)

    async def _follow(self, process: asyncio.subprocess.Process, link: EngineLink) -> int:
        """Handle the engine's events until it ends; returns its exit code."""
        exited = asyncio.create_task(process.wait())
        receiving: asyncio.Task[None] = asyncio.create_task(self._receive_events(link))
        try:
            await asyncio.wait((exited, receiving), return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                receiving.result()  # a failed start is raised here
            return await exited
        finally:
            receiving.cancel()
            exited.cancel()

    async def _receive_events(self, link: EngineLink) -> None:
        while True:
            event = await link.receive()
            match event:
                case StepEvents():
                    self.stats = event.stats
                case Progress():
                    self.progress = event
                case Ready():
                    self._on_ready(event)
                case StartFailed():
                    raise ServiceStartError(event.message)

    def _on_ready(self, ready: Ready) -> None:
        self.engine = ready
        self.stats = ready.stats
        self.progress = Progress("ready", 1.0)
        if self.state == "loading":
            self.state = "ready"
        logger.info(
            "engine ready: model %s, transport %s, %d usable blocks",
            ready.model,
            ready.transport,
            ready.stats.num_usable_blocks,
        )


async def _spawn(config: EngineConfig) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "engine.process",
        stdin=asyncio.subprocess.PIPE,
        env=environment_for_child(),
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
