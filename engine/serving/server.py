"""Run an app and its engine supervisor until SIGTERM or SIGINT, then drain and leave with exit code 0."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from engine.serving.errors import ServiceStartError
from engine.serving.http_protocol import HttpProtocol
from engine.serving.service_token import ServiceTokenCheck
from engine.serving.settings import EngineServiceSettings
from engine.serving.supervisor import EngineSupervisor
from processes.child import die_with_parent
from processes.listener import ListenError, bind_listener
from settings.secret_keys import SecretKeysError, secret_keys

logger = logging.getLogger(__name__)

LAST_WORDS_S = 1
"""After the grace, or once nothing runs, connections have this long to be closed by the other side."""


def run_service(
    app: FastAPI, supervisor: EngineSupervisor, program: str, settings: EngineServiceSettings
) -> int:
    """Serve until told to stop; returns the process's exit code."""
    die_with_parent(signal.SIGTERM)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # it would log its own start and end
    try:
        tokens = secret_keys(settings.service_token, settings.service_token_file)
        app.add_middleware(ServiceTokenCheck, tokens=tokens)
        listener = bind_listener(settings.host, settings.port)
        uvicorn_config = uvicorn.Config(
            app,
            http=HttpProtocol,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=LAST_WORDS_S,
            lifespan="off",
        )
        server = DrainingServer(uvicorn_config, supervisor, settings.grace_s)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(server, listener, supervisor))
    except (ServiceStartError, ListenError, SecretKeysError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    return 0


class DrainingServer(uvicorn.Server):
    """uvicorn that drains the supervisor on the first signal and does not raise the signal again.

    The port stays open until nothing runs: probes hear that it drains, late requests are refused in so many
    words, and whoever gives a hand-over up can say so.
    """

    def __init__(self, config: uvicorn.Config, supervisor: EngineSupervisor, grace_s: float) -> None:
        super().__init__(config)
        self._supervisor = supervisor
        self._grace_s = grace_s
        self._stopping: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, self._on_signal)
        yield

    def _on_signal(self) -> None:
        if self._stopping is not None:
            self.force_exit = self.should_exit = True  # a second signal does not wait for the grace to end
            return
        supervisor = self._supervisor
        logger.info("draining %d requests, for at most %g s", supervisor.num_open_requests, self._grace_s)
        supervisor.drain(self._grace_s)
        self._stopping = asyncio.get_running_loop().create_task(self._stop_when_idle())

    async def _stop_when_idle(self) -> None:
        supervisor = self._supervisor
        try:
            async with asyncio.timeout(self._grace_s):
                await supervisor.until_idle()
        except TimeoutError:
            logger.warning(
                "leaving with %d open requests and %d hand-overs that nobody has taken (--grace-s %g)",
                supervisor.num_open_requests,
                supervisor.num_held_handovers,
                self._grace_s,
            )
        self.config.timeout_graceful_shutdown = LAST_WORDS_S
        self.should_exit = True


async def _serve(server: uvicorn.Server, listener: socket.socket, supervisor: EngineSupervisor) -> None:
    supervising = asyncio.create_task(supervisor.run())
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.wait((supervising, serving), return_when=asyncio.FIRST_COMPLETED)
        if supervising.done():
            server.should_exit = True
            await serving
            supervising.result()
    finally:
        supervising.cancel()
        await asyncio.gather(supervising, serving, return_exceptions=True)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
