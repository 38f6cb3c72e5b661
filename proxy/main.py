"""Starts one proxy process."""

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from model_files.errors import ModelFilesError
from processes.child import die_with_parent
from processes.listener import ListenError, bind_listener, inherited_listener
from proxy.app import create_app
from proxy.discovery.errors import DiscoverySetupError
from proxy.draining import ClosingConnections, Draining
from proxy.http_protocol import HttpProtocol
from proxy.native import loading
from proxy.settings import ProxySettings
from proxy.text_model import TextModel
from proxy.workers.supervisor import run_workers
from settings.loading import load_settings
from settings.secret_keys import SecretKeysError

logger = logging.getLogger(__name__)

PROGRAM = "python -m proxy"
MIN_DESCRIPTORS = 4096
TICK_S = 1.0
GARBAGE_THRESHOLD = 5000
"""Objects that may be made before those among them that refer to each other are looked for."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    settings = load_settings(ProxySettings, PROGRAM, arguments)
    die_with_parent(signal.SIGTERM)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    _log_only_what_is_shown()
    for chatty in ("httpx", "uvicorn", "kubernetes", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    if settings.workers > 1 and settings.worker_directory is None:
        return _serve_with_workers(settings, arguments)
    try:
        text = _load_text_model(settings)
        app = create_app(settings, text)
        listening = _listening(settings)
    except (ModelFilesError, ListenError, SecretKeysError, DiscoverySetupError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    _raise_descriptor_limit()
    _collect_seldom()
    logger.info("proxy for %s listening on %s", text.name, _url(listening))
    if loading.REASON is not None:
        logger.info("tokens take Python's path, which costs more: %s", loading.REASON)
    _serve(settings, app, listening)
    return 0


def _serve_with_workers(settings: ProxySettings, arguments: Sequence[str]) -> int:
    """Only watches; everything that can be wrong with model and keys is told by the workers."""
    try:
        listening = _listening(settings)
    except ListenError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1

    def command(number: int, descriptor: int, directory: Path) -> Sequence[str]:
        own = {"number": number, "socket": descriptor, "directory": directory}
        flags = [part for name, value in own.items() for part in (f"--worker-{name}", str(value))]
        return ["-m", "proxy", *arguments, *flags]

    logger.info("%d workers listening on %s", settings.workers, _url(listening))
    return run_workers(settings.workers, listening, command)


def _listening(settings: ProxySettings) -> socket.socket:
    if settings.worker_socket is not None:
        return inherited_listener(settings.worker_socket)
    return bind_listener(settings.host, settings.port)


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _load_text_model(settings: ProxySettings) -> TextModel:
    from model_files import resolve_model

    tool_format = None if settings.tool_parser == "auto" else settings.tool_parser
    return TextModel.from_files(resolve_model(settings.model), tool_format)


def _log_only_what_is_shown() -> None:
    """Each line would otherwise look for its thread, process, task and place in the source."""
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # as the logging HOWTO says


def _collect_seldom() -> None:
    """A sixth of a small request went into looking for garbage among what lives as long as the process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD, 20, 20)


def _raise_descriptor_limit() -> None:
    """A stream takes three descriptors: the client's and one for each leg."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < MIN_DESCRIPTORS:
        logger.warning(
            "only %d descriptors are allowed: about %d streams at once (ulimit -n)", hard, hard // 3
        )


def _serve(settings: ProxySettings, app: FastAPI, listening: socket.socket) -> None:
    draining: Draining = app.state.services.draining
    config = uvicorn.Config(
        ClosingConnections(app, draining),
        http=HttpProtocol,
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nobody asks where a client is
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    server = DrainingServer(config, draining, settings.grace_s)
    server.run(sockets=[listening])


class DrainingServer(uvicorn.Server):
    """On the first signal it drains and then stops with status 0; on the second it stops at once.

    Connections end with what runs on them, idle ones at once, so that clients connect to another proxy.
    """

    def __init__(self, config: uvicorn.Config, draining: Draining, grace_s: float) -> None:
        super().__init__(config)
        self._draining = draining
        self._grace_s = grace_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_to_exit = asyncio.Event()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        stopping = asyncio.create_task(self._stop_when_drained())
        try:
            await super().serve(sockets)
        finally:
            stopping.cancel()

    async def main_loop(self) -> None:
        """A tick a second, for the date in answers; uvicorn's ten are a part of what an idle proxy costs."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._is_to_exit.wait()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Called between two bytecodes of whatever runs: only hand over to the loop.
        assert self._loop is not None
        if self._draining.has_begun:
            self.should_exit = self.force_exit = True
        self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        if self.should_exit:
            self._is_to_exit.set()
        self._draining.begin()
        for connection in list(self.server_state.connections):
            connection.shutdown()

    async def _stop_when_drained(self) -> None:
        await self._draining.finish(self._grace_s)
        logger.info("drained: stopping")
        self.should_exit = True
        self._is_to_exit.set()
