"""Reads over ZMQ, for machines without NIXL.

The reader asks for pieces of about 1 MiB, a few at a time, and the source answers each with one message, so
the source keeps no state of its readers and a reader cancels by not asking. The source serves from a thread
and a socket of their own; control messages never wait behind data. Short extents are gathered into staging
buffers; long ones leave without a copy and are received straight into their destination.
"""

import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
import zmq
from msgspec import Meta, Struct

from kv_transfer.errors import ReadError
from kv_transfer.layout import Region
from kv_transfer.messages import MAX_REGIONS
from kv_transfer.pump import IDLE_S, Pump
from kv_transfer.sockets import bind
from kv_transfer.transport import BlockRead, ReadResult, RemoteMemory
from kv_transfer.transports.pieces import (
    MAX_EXTENT_BYTES,
    MAX_EXTENTS,
    MAX_PIECE_BYTES,
    MAX_STAGED_BYTES,
    Extents,
    Piece,
    cut,
    is_staged,
)
from kv_transfer.transports.raw import region_view

logger = logging.getLogger(__name__)

WINDOW = 8
"""Pieces a reader has under way from one source."""

SEND_QUEUE = 64
"""Answers that wait for one reader: far more than its window, since ZMQ learns late what was taken."""

POLL_BUDGET_S = 0.002

NUM_STAGING_BUFFERS = 16

SOCKET_BUFFER_BYTES = 4 << 20

MAX_REQUEST_BYTES = 64 << 10

DATA_SUFFIX = "-data"
"""Of the data socket's path where the control socket is ipc."""

_TOKEN_BYTES = 16


class _Blob(Struct, frozen=True, array_like=True):
    token: Annotated[bytes, Meta(min_length=_TOKEN_BYTES, max_length=_TOKEN_BYTES)]
    """Differs at every start of a source: what was meant for its predecessor is refused."""
    port: Annotated[int, Meta(ge=0, le=65535)]


class _Ask(Struct, frozen=True, array_like=True):
    token: Annotated[bytes, Meta(max_length=_TOKEN_BYTES)]
    sequence: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    region: Annotated[int, Meta(ge=0, lt=MAX_REGIONS)]
    extents: Annotated[bytes, Meta(min_length=16, max_length=MAX_EXTENTS * 16)]
    """int64 pairs, little-endian: byte offset, number of bytes."""


class _Answer(Struct, frozen=True, array_like=True):
    """The frame before the data; `error` comes with an empty data frame."""

    sequence: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    error: Annotated[str, Meta(max_length=256)] = ""


_encode = msgspec.msgpack.Encoder().encode
_decode_blob = msgspec.msgpack.Decoder(_Blob).decode
_decode_ask = msgspec.msgpack.Decoder(_Ask).decode
_decode_answer = msgspec.msgpack.Decoder(_Answer).decode


class ZmqTransport:
    name = "zmq"

    def __init__(self) -> None:
        self._regions: tuple[Region, ...] = ()
        self._server: _Server | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    @property
    def version(self) -> str:
        return zmq.zmq_version()

    def register(self, regions: Sequence[Region], serve_at: str | None) -> bytes:
        self._regions = tuple(regions)
        if serve_at is None:
            return b""
        self._server = _Server(self._regions, _data_bind_address(serve_at))
        return _encode(_Blob(self._server.token, self._server.port))

    def connect(self, memory: RemoteMemory, regions: Sequence[Region] | None = None) -> "ZmqConnection":
        try:
            blob = _decode_blob(memory.blob)
        except msgspec.MsgspecError as error:
            raise ReadError(f"the source's zmq address is not valid: {error}") from error
        if self._context is None:
            self._context = zmq.Context()
        address = _data_address(memory.host_address, blob.port)
        return ZmqConnection(self._context, address, blob.token, memory, regions or self._regions)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._context is not None:
            self._context.term()
            self._context = None


def _data_bind_address(control: str) -> str:
    scheme, _, rest = control.partition("://")
    return f"tcp://{rest.rpartition(':')[0]}:0" if scheme == "tcp" else control + DATA_SUFFIX


def _data_address(control: str, port: int) -> str:
    scheme, _, rest = control.partition("://")
    return f"tcp://{rest.rpartition(':')[0]}:{port}" if scheme == "tcp" else control + DATA_SUFFIX


def _data_socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, max_bytes: int) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.SNDBUF, SOCKET_BUFFER_BYTES)
    socket.setsockopt(zmq.RCVBUF, SOCKET_BUFFER_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 500)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1500)
    return socket


class _Server:
    """Answers pieces from a thread of its own; asks that are not valid get an error, never an exception."""

    def __init__(self, regions: Sequence[Region], address: str) -> None:
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self.port = 0
        self._address = address
        self._flat = [region_view(region).reshape(-1) for region in regions]
        self._staging = _Staging()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._pump = Pump("kv-data-server", self._set_up, self._turn, self._tear_down, lambda: None)
        self._pump.start()

    def close(self) -> None:
        self._pump.stop()

    def _set_up(self) -> None:
        self._socket = _data_socket(self._context, zmq.ROUTER, MAX_REQUEST_BYTES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        endpoint = bind(self._socket, self._address)
        if endpoint.startswith("tcp://"):
            self.port = int(endpoint.rpartition(":")[2])
        self._pump.poller.register(self._socket, zmq.POLLIN)

    def _turn(self) -> float:
        assert self._socket is not None
        for _ in range(WINDOW):
            try:
                reader, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return IDLE_S
            # An unreachable reader has gone; one whose queue is full asked for more than its window.
            with contextlib.suppress(zmq.ZMQError):
                self._answer(self._socket, reader, frames)
        return 0.0

    def _answer(self, socket: "zmq.Socket[bytes]", reader: bytes, frames: Sequence[bytes]) -> None:
        try:
            ask = _decode_ask(frames[0] if len(frames) == 1 else b"")
        except (msgspec.MsgspecError, ValueError):
            return
        extents, error = self._check(ask)
        if error:
            socket.send_multipart([reader, _encode(_Answer(ask.sequence, error)), b""], zmq.NOBLOCK)
            return
        flat = self._flat[ask.region]
        socket.send_multipart([reader, _encode(_Answer(ask.sequence))], zmq.NOBLOCK | zmq.SNDMORE)
        if is_staged(extents):
            self._staging.send(socket, flat, extents)
            return
        last = len(extents) - 1
        for index, (offset, size) in enumerate(extents.tolist()):
            more = zmq.SNDMORE if index < last else 0
            socket.send(flat[offset : offset + size].data, zmq.NOBLOCK | more, copy=False)

    def _check(self, ask: _Ask) -> tuple[Extents, str]:
        extents = np.zeros((0, 2), dtype=np.int64)
        if ask.token != self.token:
            return extents, "the source was restarted"
        if ask.region >= len(self._flat) or len(ask.extents) % 16:
            return extents, "no such region"
        extents = np.frombuffer(ask.extents, dtype="<i8").reshape(-1, 2)
        limit = self._flat[ask.region].size
        offsets, sizes = extents[:, 0], extents[:, 1]
        in_region = (offsets >= 0) & (sizes >= 1) & (sizes <= MAX_EXTENT_BYTES) & (offsets <= limit - sizes)
        if not in_region.all() or int(sizes.sum()) > MAX_PIECE_BYTES:
            return extents, "outside the region"
        if is_staged(extents) and int(sizes.sum()) > MAX_STAGED_BYTES:
            return extents, "too much for one message"
        return extents, ""

    def _tear_down(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._context.term()


class _Staging:
    """Reused send buffers of one piece each; a buffer is free again when ZMQ has let go of it."""

    def __init__(self) -> None:
        self._in_use: deque[tuple[zmq.MessageTracker, npt.NDArray[np.uint8]]] = deque()

    def send(self, socket: "zmq.Socket[bytes]", flat: npt.NDArray[np.uint8], extents: Extents) -> None:
        buffer = self._take()
        end = 0
        for offset, size in extents.tolist():
            buffer[end : end + size] = flat[offset : offset + size]
            end += size
        tracker = socket.send(buffer[:end].data, zmq.NOBLOCK, copy=False, track=True)
        self._in_use.append((tracker, buffer))

    def _take(self) -> npt.NDArray[np.uint8]:
        if self._in_use and self._in_use[0][0].done:
            return self._in_use.popleft()[1]
        if len(self._in_use) >= NUM_STAGING_BUFFERS:
            self._in_use.popleft()  # a slow reader has it: let it go with its message
        return np.empty(MAX_STAGED_BYTES, dtype=np.uint8)


class _Read:
    __slots__ = ("error", "num_left", "read_id")

    def __init__(self, read_id: int, num_left: int) -> None:
        self.read_id, self.num_left = read_id, num_left
        self.error: str | None = None


class ZmqConnection:
    """Destinations are written in `poll` only, so a cancelled read is safe at once."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        token: bytes,
        memory: RemoteMemory,
        regions: Sequence[Region],
    ) -> None:
        self._context, self._address, self._token = context, address, token
        self._memory = memory
        self._block_bytes = [region.block_bytes for region in regions]
        self._flat = [region_view(region).reshape(-1) for region in regions]
        self._socket = self._connected()
        self._reads: dict[int, _Read] = {}
        self._queue: deque[tuple[_Read, Piece]] = deque()
        self._asked: dict[int, tuple[_Read, Piece]] = {}
        self._next_id = 1
        self._next_sequence = 1

    def _connected(self) -> "zmq.Socket[bytes]":
        socket = _data_socket(self._context, zmq.DEALER, MAX_PIECE_BYTES)
        try:
            socket.connect(self._address)
        except zmq.ZMQError as error:
            socket.close()
            raise ReadError(f"cannot connect to {self._address}: {error}") from error
        return socket

    @property
    def path(self) -> str:
        return f"zmq {self._address.partition(':')[0]}"

    @property
    def waitable(self) -> "zmq.Socket[bytes] | None":
        return self._socket

    def read(self, reads: Sequence[BlockRead]) -> int:
        pieces = cut(reads, self._block_bytes)
        read = _Read(self._next_id, len(pieces))
        self._next_id += 1
        self._reads[read.read_id] = read
        self._queue.extend((read, piece) for piece in pieces)
        self._ask()
        return read.read_id

    def poll(self) -> list[ReadResult]:
        until_s = time.monotonic() + POLL_BUDGET_S
        with contextlib.suppress(zmq.Again):
            while time.monotonic() < until_s:
                self._receive()
                self._ask()
        over = [read for read in self._reads.values() if read.num_left == 0 or read.error is not None]
        for read in over:
            self._drop(read)
        return [ReadResult(read.read_id, read.error) for read in over]

    def cancel(self, read_id: int) -> bool:
        read = self._reads.get(read_id)
        if read is not None:
            self._drop(read)
        return True

    def close(self) -> None:
        self._reads.clear()
        self._queue.clear()
        self._asked.clear()
        if not self._socket.closed:
            self._socket.close()

    def _drop(self, read: _Read) -> None:
        """What still comes for it is received into nothing, or not at all if no other read needs the socket.

        A new socket also forgets answers that were lost with a broken connection, which would narrow the
        window for ever.
        """
        self._reads.pop(read.read_id, None)
        if any(queued is read for queued, _ in self._queue):
            self._queue = deque(item for item in self._queue if item[0] is not read)
        if not self._reads and self._asked:
            self._asked.clear()
            self._socket.close()
            self._socket = self._connected()

    def _ask(self) -> None:
        while self._queue and len(self._asked) < WINDOW:
            read, piece = self._queue[0]
            sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
            region = self._memory.source_of(piece.region)
            ask = _Ask(self._token, sequence, region, piece.remote.astype("<i8").tobytes())
            self._socket.send(_encode(ask), zmq.NOBLOCK)
            self._queue.popleft()  # sent: `zmq.Again` leaves it for another turn
            self._asked[sequence] = (read, piece)

    def _receive(self) -> None:
        """One answer; `zmq.Again` if there is none."""
        header = self._socket.recv(zmq.NOBLOCK)
        try:
            answer = _decode_answer(header)
        except msgspec.MsgspecError:
            self._skip()
            return
        read, piece = self._asked.pop(answer.sequence, (None, None))
        if read is None or piece is None or read.read_id not in self._reads or answer.error:
            if read is not None and answer.error:
                read.error = answer.error
            self._skip()
            return
        flat = self._flat[piece.region]
        if self._scatter(flat, piece) if is_staged(piece.local) else self._fill(flat, piece):
            read.num_left -= 1
        else:
            read.error = "an answer of the wrong size"
        self._skip()

    def _fill(self, flat: npt.NDArray[np.uint8], piece: Piece) -> bool:
        """Each extent from a frame of its own, straight into place."""
        return all(
            self._receive_into(flat[offset : offset + size], size) for offset, size in piece.local.tolist()
        )

    def _scatter(self, flat: npt.NDArray[np.uint8], piece: Piece) -> bool:
        """All extents from one frame, from ZMQ's own memory."""
        if not self._socket.getsockopt(zmq.RCVMORE):
            return False
        received = np.frombuffer(self._socket.recv(zmq.NOBLOCK, copy=False).buffer, dtype=np.uint8)
        if received.size != piece.num_bytes:
            return False
        start = 0
        for offset, size in piece.local.tolist():
            flat[offset : offset + size] = received[start : start + size]
            start += size
        return True

    def _receive_into(self, target: npt.NDArray[np.uint8], num_bytes: int) -> bool:
        """False if the next frame is missing or has another size; never more than `target` is written."""
        if not self._socket.getsockopt(zmq.RCVMORE):
            return False
        return int(self._socket.recv_into(target.data, flags=zmq.NOBLOCK)) == num_bytes

    def _skip(self) -> None:
        while self._socket.getsockopt(zmq.RCVMORE):
            self._socket.recv(zmq.NOBLOCK, copy=False)
