"""One process of the stack: started, watched while it loads, listened to, stopped."""

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from processes.child import environment_for_child

NUM_KEPT_LINES = 20
LineHandler = Callable[[str, str], None]
"""(name of the child, one line of its output)."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start a process and where to ask whether it is ready."""

    name: str
    module: str
    arguments: tuple[str, ...]
    url: str
    ready_path: str


class Child:
    """A running process of the stack."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, on_line: LineHandler) -> None:
        self.spec = spec
        self.last_lines: deque[str] = deque(maxlen=NUM_KEPT_LINES)
        self._process = process
        self._on_line = on_line
        self._reading = asyncio.create_task(self._read_lines())

    @classmethod
    async def start(cls, spec: ChildSpec, on_line: LineHandler) -> "Child":
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            spec.module,
            *spec.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment_for_child(),
            start_new_session=True,  # Ctrl-C reaches the launcher alone; it stops the others in order
        )
        return cls(spec, process, on_line)

    async def wait(self) -> int:
        """The exit code, once every line the process wrote has been read."""
        await asyncio.shield(self._reading)
        return await self._process.wait()

    def why(self) -> str:
        """The last thing the process said."""
        return self.last_lines[-1] if self.last_lines else "it said nothing"

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`."""
        if self._process.returncode is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._reading.cancel()

    async def _read_lines(self) -> None:
        assert self._process.stdout is not None
        async for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self.last_lines.append(line)
            self._on_line(self.spec.name, line)


async def first_to_end(children: Sequence[Child]) -> tuple[Child, int]:
    """Wait until any child ends; returns it and its exit code."""
    waits = {asyncio.create_task(child.wait()): child for child in children}
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        task = done.pop()
        return waits[task], task.result()
    finally:
        for task in waits:
            task.cancel()
