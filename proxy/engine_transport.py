"""Connections to engines, under httpx.

httpx's own pool looks at every connection at each request and each close: 4 ms of CPU a request with one
client, 40 ms with 256. This one keeps a stack of idle connections per engine and nothing else. A response
that is closed before its end closes its connection at once, which is how an engine learns of an abort.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import NamedTuple

import httpx
import msgspec

from proxy.connecting import connect
from proxy.engine_connection import ConnectionBroken, EngineConnection, NotConnected
from proxy.engine_waits import Patience
from proxy.response_parser import ResponseHead

MAX_IDLE_PER_ENGINE = 512
MAX_ERROR_BYTES = 1 << 16


class Origin(NamedTuple):
    scheme: str
    host: str
    port: int


class Answer(msgspec.Struct, frozen=True):
    """A whole response."""

    head: ResponseHead
    content: bytes


class EngineTransport(httpx.AsyncBaseTransport):
    """Honours httpx's connect time-out only: time-outs on answers belong to whoever knows the request."""

    def __init__(self, *, idle_s: float) -> None:
        """`idle_s` must stay below the time after which engines close idle connections themselves."""
        self._idle_s = idle_s
        self._idle: dict[Origin, list[tuple[EngineConnection, float]]] = defaultdict(list)
        self._in_use: set[EngineConnection] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        origin = origin_of(request.url)
        content = _head(request) + await request.aread()
        connection = self._take_idle(origin)
        if connection is None:
            timeout_s = request.extensions.get("timeout", {}).get("connect")
            try:
                connection = await self._connect(origin, timeout_s)
            except NotConnected as error:
                raise as_httpx(error, request) from error.__cause__
        self._in_use.add(connection)
        try:
            head = await connection.exchange(content)
        except ConnectionBroken as error:
            self._drop(connection)
            raise httpx.RemoteProtocolError(str(error), request=request) from error
        except BaseException:
            self._drop(connection)
            raise
        stream = _ResponseStream(self, origin, connection, request)
        return httpx.Response(head.status, headers=head.headers, stream=stream)

    async def whole(
        self,
        origin: Origin,
        request: bytes,
        *,
        connect_timeout_s: float | None,
        patience: Patience | None = None,
    ) -> Answer:
        """Send a whole request, head and body, and read the whole answer, without httpx.

        `patience` is with each step; without, it is the caller's. Raises `NotConnected`, `ConnectionBroken`.
        """
        connection = self._take_idle(origin)
        if connection is None:
            connecting = self._connect(origin, connect_timeout_s)
            connection = await (connecting if patience is None else patience.within(connecting))
        self._in_use.add(connection)
        try:
            head = await connection.exchange(request, None if patience is None else patience.for_future)
            content = connection.whole_body()
            if content is None:
                rest = _rest(connection, head)
                content = await (rest if patience is None else patience.within(rest))
        finally:
            self.release(origin, connection)
        return Answer(head, content)

    async def aclose(self) -> None:
        for connection in [*self._in_use, *(item for idle in self._idle.values() for item, _ in idle)]:
            connection.abort()
        self._in_use.clear()
        self._idle.clear()

    @property
    def num_connections(self) -> int:
        return len(self._in_use) + sum(len(idle) for idle in self._idle.values())

    def check_invariants(self) -> None:
        """Every connection is in one place; what is idle carries no exchange."""
        idle = [connection for pairs in self._idle.values() for connection, _ in pairs]
        assert len(set(idle)) == len(idle)
        assert not self._in_use & set(idle)

    def release(self, origin: Origin, connection: EngineConnection) -> None:
        """The exchange is over: keep the connection, or close it where the response was not complete."""
        idle = self._idle[origin]
        if not connection.is_idle or len(idle) >= MAX_IDLE_PER_ENGINE:
            self._drop(connection)
            return
        self._in_use.discard(connection)
        idle.append((connection, asyncio.get_running_loop().time()))

    def _take_idle(self, origin: Origin) -> EngineConnection | None:
        """The connection that was used last; all older ones go when even that one is too old."""
        idle = self._idle[origin]
        oldest_s = asyncio.get_running_loop().time() - self._idle_s
        while idle:
            connection, since_s = idle.pop()
            if connection.is_idle and since_s >= oldest_s:
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: Origin, timeout_s: float | None) -> EngineConnection:
        is_tls = origin.scheme == "https"
        try:
            async with asyncio.timeout(timeout_s):
                return await connect(EngineConnection, origin.host, origin.port, is_tls=is_tls)
        except OSError as error:
            raise NotConnected(error) from error

    def _drop(self, connection: EngineConnection) -> None:
        self._in_use.discard(connection)
        connection.abort()


def as_httpx(error: NotConnected, request: httpx.Request) -> httpx.TransportError:
    """To be raised from the error's cause."""
    kind = httpx.ConnectTimeout if error.is_slow else httpx.ConnectError
    return kind(str(error), request=request)


async def _rest(connection: EngineConnection, head: ResponseHead) -> bytes:
    """The whole body; of what is no answer to the request only the beginning."""
    content = b""
    while (data := await connection.read()) is not None:
        content += data
        if head.status != 200 and len(content) > MAX_ERROR_BYTES:
            break
    return content


class _ResponseStream(httpx.AsyncByteStream):
    def __init__(
        self, owner: EngineTransport, origin: Origin, connection: EngineConnection, request: httpx.Request
    ) -> None:
        self._owner = owner
        self._origin = origin
        self._connection = connection
        self._request = request
        self._is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while (data := await self._connection.read()) is not None:
                yield data
        except ConnectionBroken as error:
            raise httpx.RemoteProtocolError(str(error), request=self._request) from error

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._owner.release(self._origin, self._connection)


def origin_of(url: httpx.URL) -> Origin:
    return Origin(url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80))


def _head(request: httpx.Request) -> bytes:
    lines = [request.method.encode() + b" " + request.url.raw_path + b" HTTP/1.1"]
    lines += [name + b": " + value for name, value in request.headers.raw]
    return b"\r\n".join(lines) + b"\r\n\r\n"
