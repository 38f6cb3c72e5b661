"""Connections to engines by name.

Names are looked up here and not by `create_connection`: uvloop's goes on looking when it is cancelled, and
the loop then reports that nobody wanted to know how that failed.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from typing import TypeVar

ProtocolT = TypeVar("ProtocolT", bound=asyncio.Protocol)


async def connect(make_protocol: Callable[[], ProtocolT], host: str, port: int, *, is_tls: bool) -> ProtocolT:
    """To the first address of `host` that takes the connection; the last one's `OSError` where none does."""
    *others, last = await _addresses(host, port)
    for address in (*others, last):
        try:
            _, protocol = await asyncio.get_running_loop().create_connection(
                make_protocol, address, port, ssl=is_tls or None, server_hostname=host if is_tls else None
            )
            return protocol
        except OSError:
            if address == last:
                raise
    raise AssertionError("the last address has answered or raised")


async def _addresses(host: str, port: int) -> list[str]:
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))
