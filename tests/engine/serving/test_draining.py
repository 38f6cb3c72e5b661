"""After SIGTERM a prompt service stays until what it holds for readers is taken, or its grace ends."""

import asyncio
import itertools
import os
import signal
from collections.abc import Callable

import msgspec
import pytest
import uvicorn
from fastapi import FastAPI

from engine.serving.server import DrainingServer
from engine.serving.settings import EngineServiceSettings
from engine.serving.supervisor import EngineSupervisor
from tests.engine.serving.builders import STATS
from wire.services import EngineRole

HOLDING = msgspec.structs.replace(STATS, num_handovers=2)


def make(role: EngineRole, grace_s: float) -> tuple[DrainingServer, EngineSupervisor]:
    supervisor = EngineSupervisor(EngineServiceSettings(), role)
    supervisor.on_stats(HOLDING)
    return DrainingServer(uvicorn.Config(FastAPI()), supervisor, grace_s), supervisor


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    for _ in itertools.takewhile(lambda _: not condition(), itertools.count()):
        await asyncio.sleep(0)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def test_a_prompt_service_leaves_when_its_handovers_are_released() -> None:
    server, supervisor = make("prompt", grace_s=60)
    with server.capture_signals():
        terminate()
        await until(lambda: supervisor.state == "draining")
        await turns()
        assert not server.should_exit
        supervisor.on_stats(msgspec.structs.replace(HOLDING, num_handovers=1))
        await turns()
        assert not server.should_exit
        supervisor.on_stats(STATS)
        await turns()
        assert server.should_exit
        assert not server.force_exit


async def test_a_completion_service_waits_for_no_handovers() -> None:
    server, supervisor = make("completion", grace_s=60)
    with server.capture_signals():
        terminate()
        await until(lambda: supervisor.state == "draining")
        await turns()
        assert server.should_exit


async def test_handovers_that_nobody_takes_do_not_outlive_the_grace(caplog: pytest.LogCaptureFixture) -> None:
    server, _ = make("prompt", grace_s=0.05)
    with server.capture_signals():
        terminate()
        await until(lambda: server.should_exit)
    assert "leaving with 0 open requests and 2 hand-overs that nobody has taken" in caplog.text


async def test_a_second_signal_waits_for_nothing() -> None:
    server, supervisor = make("prompt", grace_s=60)
    with server.capture_signals():
        terminate()
        await until(lambda: supervisor.state == "draining")
        terminate()
        await until(lambda: server.force_exit)
        assert server.should_exit
