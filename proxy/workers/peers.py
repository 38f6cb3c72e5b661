"""What the workers of one proxy ask each other, over a Unix socket each in the directory they share.

One line asks, bytes answer, and the connection ends: `metrics` for all samples of a worker, `trace ID` for
how one request went, empty from a worker that does not know it.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

ASK_TIMEOUT_S = 1.0
"""A worker that is slower than this is left out."""
MAX_LINE_BYTES = 1 << 12

Answer = Callable[[str], bytes]
"""From a line without its end to what is answered."""


def socket_path(directory: Path, number: int) -> Path:
    return directory / f"worker-{number}.sock"


class Peers:
    """One worker among others; alone where there is no directory."""

    def __init__(self, directory: Path | None, number: int) -> None:
        self._directory = directory
        self._number = number
        self._server: asyncio.Server | None = None

    async def serve(self, answer: Answer) -> None:
        """Answer the others until `close`."""
        if self._directory is None:
            return

        async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    line = await reader.readline()
                    writer.write(answer(line.decode().rstrip("\n")))
                    await writer.drain()
            except (TimeoutError, ValueError, ConnectionError):
                pass  # whoever asked has waited as long
            finally:
                writer.close()

        path = socket_path(self._directory, self._number)
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(on_connection, path, limit=MAX_LINE_BYTES)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def ask(self, line: str) -> list[bytes]:
        """The answers of all others that answer in time, in no order."""
        if self._directory is None:
            return []
        own = socket_path(self._directory, self._number)
        paths = [path for path in sorted(self._directory.glob("worker-*.sock")) if path != own]
        answers = await asyncio.gather(*(_ask(path, line) for path in paths))
        return [answer for answer in answers if answer]


async def _ask(path: Path, line: str) -> bytes:
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(line.encode() + b"\n")
                return await reader.read()
            finally:
                writer.close()
    except (TimeoutError, OSError):
        return b""  # it is being started again, or stopped
