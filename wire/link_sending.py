"""How much of a token link's tokens may be in flight: what lies in sockets is in front of every new stream.

A small SO_SNDBUF is no way to it: where it, or the other side's receive buffer, holds less than two of TCP's
segments (64 KB on loopback), the sender waits for its persist timer again and again, 0.2 s for 16 KB.
"""

import asyncio
import socket

UNSENT_BYTES = 1 << 14
"""About 1,200 tokens."""


def hold_little(transport: asyncio.WriteTransport) -> None:
    """Let the writer pause while anything waits in the transport, and no more than this in the kernel.

    Where the system cannot limit the latter, its own send buffer is the limit.
    """
    transport.set_write_buffer_limits(high=0)
    connection: socket.socket | None = transport.get_extra_info("socket")
    option: int | None = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if connection is not None and option is not None:
        connection.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES)
