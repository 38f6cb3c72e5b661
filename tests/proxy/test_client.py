"""The end of a client's connection."""

import asyncio

from proxy.asgi import Message
from proxy.client import Client
from proxy.http_protocol import ABORT


async def test_the_connection_of_a_client_that_is_given_up_is_cut_and_no_other() -> None:
    aborted: list[str] = []

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    async def stuck(message: Message) -> None:
        await asyncio.Event().wait()

    for name, num_bytes in (("reads", 10), ("stuck", 11)):

        def abort(name: str = name) -> None:
            aborted.append(name)

        scope = {"headers": [], "extensions": {ABORT: abort}}
        client = Client(scope, receive, stuck, stall_timeout_s=5.0, max_backlog_bytes=10)
        client.send_events(b"x" * num_bytes)
        await asyncio.sleep(0)
        await client.close()
    assert aborted == ["stuck"]
