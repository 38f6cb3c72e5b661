"""The engine's end of a link, played by the test."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from engine.ipc import Command, Event, RequestOutput, StepEvents, decode_command, encode
from engine.serving.engine_link import EngineLink
from engine.serving.signals import ScalingSignals
from tests.engine.serving.builders import STATS


class ScriptedEngine:
    """Reads commands and sends events exactly when the test says so."""

    def __init__(self, context: zmq.asyncio.Context, commands: str, events: str) -> None:
        self._commands = context.socket(zmq.PULL)
        self._commands.connect(commands)
        self._events = context.socket(zmq.PUSH)
        self._events.connect(events)

    async def command(self) -> Command:
        async with asyncio.timeout(10):
            return decode_command(await self._commands.recv())

    async def send(self, event: Event) -> None:
        await self._events.send(encode(event))

    async def send_outputs(self, *outputs: RequestOutput) -> None:
        await self.send(StepEvents(outputs, STATS))

    def close(self) -> None:
        self._commands.close(linger=0)
        self._events.close(linger=0)


@pytest.fixture
async def link_and_engine(tmp_path: Path) -> AsyncIterator[tuple[EngineLink, ScriptedEngine]]:
    context = zmq.asyncio.Context()
    commands, events = f"ipc://{tmp_path}/commands", f"ipc://{tmp_path}/events"
    link = EngineLink(context, commands, events, ScalingSignals(time.monotonic))
    engine = ScriptedEngine(context, commands, events)
    receiving = asyncio.create_task(_receive(link))
    yield link, engine
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)
    link.close()
    engine.close()
    context.destroy(linger=0)


async def _receive(link: EngineLink) -> None:
    while True:
        await link.receive()
