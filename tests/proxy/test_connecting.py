"""Connections by name."""

import asyncio
import contextlib
import socket
from typing import Any

import pytest
import uvloop

from proxy.connecting import connect


class Nothing(asyncio.Protocol):
    pass


def test_a_name_that_is_given_up_on_fails_unheard() -> None:
    """With uvloop, which looks names up itself."""
    reported: list[dict[str, Any]] = []

    async def give_up() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await connect(Nothing, "no-such-host.invalid", 80, is_tls=False)
        # Names are looked up in threads, one after the other where there is one.
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().getaddrinfo("no-such-host-either.invalid", 80)
        await asyncio.sleep(0.01)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(give_up())
    assert reported == []


async def test_all_addresses_of_a_name_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def getaddrinfo(host: str, *arguments: Any, **options: Any) -> list[Any]:
        some = ("127.0.0.2", "127.0.0.1") if host == "engine" else (host,)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in some]

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    assert isinstance(await connect(Nothing, "engine", port, is_tls=False), Nothing)
    server.close()
    await server.wait_closed()
    with pytest.raises(ConnectionRefusedError):
        await connect(Nothing, "engine", port, is_tls=False)
