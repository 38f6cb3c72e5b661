"""The end of a client's connection."""

import asyncio
from collections.abc import Callable

import pytest

from proxy.asgi import Message
from proxy.client import Client, ClientGone
from proxy.http_protocol import EXCHANGE


class StuckExchange:
    """Everything that is written has to wait."""

    def __init__(self, name: str, aborted: list[str]) -> None:
        self._name = name
        self._aborted = aborted

    def begin(self, headers: bytes, part: bytes) -> bool:
        return False

    def write(self, part: bytes) -> bool:
        return False

    def respond(self, status: int, headers: bytes, content: bytes) -> bool:
        raise AssertionError("nothing is written")

    def abort(self) -> None:
        self._aborted.append(self._name)


async def test_the_connection_of_a_client_that_is_given_up_is_cut_and_no_other() -> None:
    aborted: list[str] = []

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    async def stuck(message: Message) -> None:
        await asyncio.Event().wait()

    for name, num_bytes in (("reads", 10), ("stuck", 11)):
        scope = {"headers": [], "extensions": {EXCHANGE: StuckExchange(name, aborted)}}
        client = Client(scope, receive, stuck, stall_timeout_s=5.0, max_backlog_bytes=10)
        client.send_events(b"x" * num_bytes)
        await asyncio.sleep(0)
        await client.close()
    assert aborted == ["stuck"]


class Leaving(StuckExchange):
    """The test says when its client leaves."""

    def __init__(self) -> None:
        super().__init__("leaving", [])
        self.left: Callable[[], None] | None = None

    def on_left(self, left: Callable[[], None]) -> Callable[[], None]:
        self.left = left
        return lambda: None


async def test_a_client_that_leaves_once_everything_was_sent_has_not_left_its_request() -> None:
    gone: list[ClientGone] = []

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    async def sends(message: Message) -> None:
        pass

    for is_complete in (False, True):
        exchange = Leaving()
        scope = {"headers": [], "extensions": {EXCHANGE: exchange}}
        client = Client(scope, receive, sends, stall_timeout_s=5.0, max_backlog_bytes=10)
        client.watch(gone.append)
        client.send_events(b"x")
        if is_complete:
            await client.end_events(b"y")
        assert exchange.left is not None
        exchange.left()
        assert len(gone) == 1, "the first has, the second has not"
        client.unwatch()
        await client.close()


@pytest.mark.parametrize("value", ["1\r\nx-more: 2", "1\nx-more: 2", "1\rx-more: 2"])
async def test_no_header_of_an_answer_becomes_two(value: str) -> None:
    async def never(*_: object) -> Message:
        raise AssertionError("nothing is read or sent")

    scope = {"headers": [], "extensions": {EXCHANGE: StuckExchange("", [])}}
    client = Client(scope, never, never, stall_timeout_s=5.0, max_backlog_bytes=10)
    client.headers["retry-after"] = value
    with pytest.raises(ValueError, match="line break"):
        await client.send_json(429, b"{}")
