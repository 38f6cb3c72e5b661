"""Starts one proxy process."""

import asyncio
import logging
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType

import uvicorn
from fastapi import FastAPI

from model_files.errors import ModelFilesError
from processes.child import die_with_parent
from processes.listener import ListenError, bind_listener
from proxy.app import create_app
from proxy.discovery.errors import DiscoverySetupError
from proxy.draining import Draining
from proxy.settings import ProxySettings
from proxy.text_model import TextModel
from settings.loading import load_settings
from settings.secret_keys import SecretKeysError

logger = logging.getLogger(__name__)

PROGRAM = "python -m proxy"
MIN_DESCRIPTORS = 4096


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    settings = load_settings(ProxySettings, PROGRAM, sys.argv[1:] if argv is None else argv)
    die_with_parent(signal.SIGTERM)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    for chatty in ("httpx", "uvicorn", "kubernetes", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        text = _load_text_model(settings)
        app = create_app(settings, text)
        listening = bind_listener(settings.host, settings.port)
    except (ModelFilesError, ListenError, SecretKeysError, DiscoverySetupError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    _raise_descriptor_limit()
    host, port = listening.getsockname()[:2]
    shown_host = f"[{host}]" if ":" in host else host
    logger.info("proxy for %s listening on http://%s:%d", text.name, shown_host, port)
    _serve(settings, app, listening)
    return 0


def _load_text_model(settings: ProxySettings) -> TextModel:
    from model_files import resolve_model

    tool_format = None if settings.tool_parser == "auto" else settings.tool_parser
    return TextModel.from_files(resolve_model(settings.model), tool_format)


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
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    server = DrainingServer(config, app.state.services.draining, settings.grace_s)
    server.run(sockets=[listening])


class DrainingServer(uvicorn.Server):
    """On the first signal it drains and then stops with status 0; on the second it stops at once."""

    def __init__(self, config: uvicorn.Config, draining: Draining, grace_s: float) -> None:
        super().__init__(config)
        self._draining = draining
        self._grace_s = grace_s
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        stopping = asyncio.create_task(self._stop_when_drained())
        try:
            await super().serve(sockets)
        finally:
            stopping.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Called between two bytecodes of whatever runs: only hand over to the loop.
        assert self._loop is not None
        if self._draining.has_begun:
            self.should_exit = self.force_exit = True
        self._loop.call_soon_threadsafe(self._draining.begin)

    async def _stop_when_drained(self) -> None:
        await self._draining.finish(self._grace_s)
        logger.info("drained: stopping")
        self.should_exit = True
