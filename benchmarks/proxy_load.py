"""Clients of a proxy that cost little themselves: streams that count, small requests one after the other."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

EVENT = b"data: "


@dataclass(slots=True)
class StreamCounter:
    num_tokens: int = 0
    num_ended: int = 0
    gaps_s: list[float] = field(default_factory=list)
    """Between arrivals at a stream."""


class StreamClient(asyncio.Protocol):
    """Sends one request and counts the events of its answer; with `reads=False` it never reads."""

    def __init__(self, request: bytes, counter: StreamCounter, *, reads: bool = True) -> None:
        self._request = request
        self._counter = counter
        self._reads = reads
        self._heard_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connection = cast(asyncio.Transport, transport)
        connection.write(self._request)
        if not self._reads:
            # uvloop begins to read after this call.
            asyncio.get_running_loop().call_soon(connection.pause_reading)

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if self._heard_s:
            self._counter.gaps_s.append(now_s - self._heard_s)
        self._heard_s = now_s
        self._counter.num_tokens += data.count(EVENT)

    def connection_lost(self, exc: Exception | None) -> None:
        self._counter.num_ended += 1


@contextlib.asynccontextmanager
async def open_streams(
    url: str, model: str, num_streams: int, *, reads: bool = True
) -> AsyncIterator[StreamCounter]:
    """So many streams, until the context is left."""
    counter = StreamCounter()
    request = request_bytes(model, max_tokens=1_000_000, stream=True)
    loop, (host, port) = asyncio.get_running_loop(), _address(url)
    connections: list[asyncio.Transport] = []
    try:
        for _ in range(num_streams):
            connected = socket.create_connection((host, port)) if reads else _narrow(host, port)
            transport, _client = await loop.create_connection(
                lambda: StreamClient(request, counter, reads=reads), sock=connected
            )
            connections.append(transport)
        yield counter
    finally:
        for transport in connections:
            transport.abort()


@dataclass(slots=True)
class Waited:
    """What the requests of some clients took."""

    first_byte_s: list[float] = field(default_factory=list)
    num_failed: int = 0


class RequestClient(asyncio.Protocol):
    """One kept connection; `num_left` requests, each when the one before is answered."""

    def __init__(self, request: bytes, num_requests: int, waited: Waited) -> None:
        self._request = request
        self._num_left = num_requests
        self._waited = waited
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._sent_s = 0.0
        self._is_first = True
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._next()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the proxy closed the connection"))

    def on_body(self, data: bytes) -> None:
        if self._is_first:
            self._is_first = False
            self._waited.first_byte_s.append(time.perf_counter() - self._sent_s)

    def on_message_complete(self) -> None:
        self._waited.num_failed += self._parser.get_status_code() != 200
        # The old one goes on only where the server says that it keeps the connection.
        self._parser = httptools.HttpResponseParser(self)
        self._next()

    def _next(self) -> None:
        assert self._transport is not None
        if not self._num_left:
            if not self.done.done():
                self.done.set_result(None)
            return
        self._num_left -= 1
        self._is_first = True
        self._sent_s = time.perf_counter()
        self._transport.write(self._request)


async def small_requests(
    url: str, model: str, *, num_clients: int, num_requests: int, stream: bool = False, max_tokens: int = 4
) -> Waited:
    """All clients at once; returns when everything is answered. A failed one raises `ConnectionError`."""
    request = request_bytes(model, max_tokens=max_tokens, stream=stream)
    waited, loop, (host, port) = Waited(), asyncio.get_running_loop(), _address(url)
    clients: list[RequestClient] = []
    transports: list[asyncio.Transport] = []
    try:
        for _ in range(num_clients):
            transport, client = await loop.create_connection(
                lambda: RequestClient(request, num_requests // num_clients, waited), host, port
            )
            transports.append(transport)
            clients.append(client)
        await asyncio.gather(*(client.done for client in clients))
    finally:
        for transport in transports:
            transport.abort()
    if waited.num_failed:
        raise ConnectionError(f"{waited.num_failed} of {num_requests} requests to {url} were not answered")
    return waited


def request_bytes(model: str, *, max_tokens: int, stream: bool) -> bytes:
    body = {"model": model, "prompt": "hi", "max_tokens": max_tokens, "stream": stream}
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: proxy\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def _narrow(host: str, port: int) -> socket.socket:
    """A connection that holds little: loopback's own swallow megabytes before anybody has to wait."""
    narrow = socket.socket()
    narrow.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    narrow.connect((host, port))
    return narrow


def _address(url: str) -> tuple[str, int]:
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    return address.hostname, address.port
