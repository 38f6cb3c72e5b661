"""What lies between a service and a client that does not read."""

import asyncio
import socket

import uvicorn
from starlette.types import Receive, Scope, Send

from engine.serving.http_protocol import HOLD_LITTLE, HttpProtocol
from processes.listener import bind_listener
from tests.proxy.builders import until
from tests.proxy.mock_engines import QuickServer
from wire.link_sending import UNSENT_BYTES

PART = bytes(4096)
RECEIVE_BUFFER_BYTES = 1 << 16
"""Of the client; Linux doubles it, and the client announces no larger window."""
MOST_BYTES = 2 * RECEIVE_BUFFER_BYTES + UNSENT_BYTES + 4 * len(PART)


async def test_a_response_that_holds_little_waits_for_its_client_after_tens_of_kilobytes() -> None:
    num_sent, has_read = 0, False

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_sent
        scope["extensions"][HOLD_LITTLE]()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not has_read:
            await send({"type": "http.response.body", "body": PART, "more_body": True})
            num_sent += 1

    listener = bind_listener("127.0.0.1", 0)
    config = uvicorn.Config(endless, http=HttpProtocol, log_config=None, lifespan="off")
    server = QuickServer(config)
    serving = asyncio.create_task(server.serve_here(listener))
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        client.setblocking(False)
        await loop.sock_connect(client, listener.getsockname())
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        num_read = 0
        for _ in range(40):  # what waits is read, and more comes, again and again
            await until(lambda: num_sent > 0)
            num_read += len(await loop.sock_recv(client, 1 << 14))
            assert num_sent * len(PART) - num_read <= MOST_BYTES
        has_read = True
    server.stopping.set()
    await serving
