"""Reads HTTP/1.1 responses from the pieces a socket gives (RFC 9112, the client's side of it)."""

from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

MAX_HEAD_BYTES = 1 << 16
MAX_CHUNK_LINE_BYTES = 1 << 10


class MalformedResponse(Exception):
    """What arrived is no HTTP/1.1 response."""


@dataclass(frozen=True, slots=True)
class ResponseHead:
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    """Names in lower case."""

    def header(self, name: bytes) -> bytes | None:
        for key, value in self.headers:
            if key == name:
                return value
        return None


class _State(Enum):
    HEAD = auto()
    SIZED = auto()
    CHUNK_LINE = auto()
    CHUNK_DATA = auto()
    TRAILER = auto()
    UNTIL_CLOSE = auto()
    DONE = auto()


class ResponseParser:
    """One response; a new one begins with a new parser."""

    def __init__(self) -> None:
        self.head: ResponseHead | None = None
        self.is_reusable = False
        """The connection may carry another request once this response is complete."""
        self._state = _State.HEAD
        self._rest = b""
        self._at = 0
        """Where in `_rest` the next element begins: cutting each one off would copy all that follows it."""
        self._num_left = 0

    @property
    def is_complete(self) -> bool:
        return self._state is _State.DONE

    def feed(self, data: bytes) -> bytes:
        """The body bytes found in `data`; sets `head` and `is_complete`. Raises `MalformedResponse`."""
        self._rest = self._rest + data if self._rest else data
        body: list[bytes] = []
        while self._at < len(self._rest) and self._step(body):
            pass
        self._rest, self._at = self._rest[self._at :], 0
        if self._rest and self._state is _State.DONE:
            raise MalformedResponse("bytes follow the end of a response")
        return body[0] if len(body) == 1 else b"".join(body)

    def feed_eof(self) -> None:
        """The peer has closed; raises `MalformedResponse` where the response is not complete."""
        if self._state is _State.UNTIL_CLOSE:
            self._state = _State.DONE
        if self._state is not _State.DONE:
            what = "in the middle of a response" if self.head or self._rest else "without a response"
            raise MalformedResponse(f"the connection was closed {what}")

    def _step(self, body: list[bytes]) -> bool:
        """Take one element of `_rest`; False when it needs more bytes or the response is complete."""
        match self._state:
            case _State.HEAD:
                return self._take_head()
            case _State.SIZED | _State.CHUNK_DATA:
                return self._take_sized(body)
            case _State.CHUNK_LINE:
                return self._take_whole_chunks(body) or self._take_chunk_line()
            case _State.TRAILER:
                return self._take_trailer()
            case _State.UNTIL_CLOSE:
                body.append(self._rest[self._at :])
                self._at = len(self._rest)
        return False

    def _take_head(self) -> bool:
        end = self._rest.find(b"\r\n\r\n", self._at)
        if end < 0:
            if len(self._rest) - self._at > MAX_HEAD_BYTES:
                raise MalformedResponse("the response's head is too long")
            return False
        version, head = _parse_head(self._rest[self._at : end])
        self._at = end + 4
        if head.status < 200:  # 100 Continue and the like precede the response
            return True
        self.head = head
        connection = (head.header(b"connection") or b"").lower()
        self.is_reusable = version == b"HTTP/1.1" and b"close" not in connection
        self._begin_body(head)
        return True

    def _begin_body(self, head: ResponseHead) -> None:
        length = head.header(b"content-length")
        if head.status in (204, 304):
            self._state = _State.DONE
        elif (head.header(b"transfer-encoding") or b"").lower() == b"chunked":
            self._state = _State.CHUNK_LINE
        elif length is not None:
            self._num_left = _parse_number(length, 10)
            self._state = _State.SIZED if self._num_left else _State.DONE
        else:
            self.is_reusable = False
            self._state = _State.UNTIL_CLOSE

    def _take_sized(self, body: list[bytes]) -> bool:
        piece = self._rest[self._at : self._at + self._num_left]
        self._at += len(piece)
        self._num_left -= len(piece)
        body.append(piece)
        if self._num_left:
            return False
        if self._state is _State.SIZED:
            self._state = _State.DONE
        else:
            self._num_left = -1  # the line that ends the chunk
            self._state = _State.CHUNK_LINE
        return True

    def _take_whole_chunks(self, body: list[bytes]) -> bool:
        """Chunks that are here from end to end, which nearly all are; False where there is none."""
        if self._num_left == -1:
            return False
        data, at = self._rest, self._at
        while (end := data.find(b"\r\n", at, at + MAX_CHUNK_LINE_BYTES)) > 0:
            line = data[at:end]
            if not line.isalnum():
                break
            try:
                num_bytes = int(line, 16)
            except ValueError:
                raise _no_length(line) from None
            behind = end + 2 + num_bytes
            if not num_bytes or data[behind : behind + 2] != b"\r\n":
                break
            body.append(data[end + 2 : behind])
            at = behind + 2
        has_found, self._at = at > self._at, at
        return has_found

    def _take_chunk_line(self) -> bool:
        line = self._take_line()
        if line is None:
            return False
        if self._num_left == -1:
            if line:
                raise MalformedResponse("a chunk is longer than it said")
            self._num_left = 0
            return True
        self._num_left = _parse_number(line.partition(b";")[0].strip(), 16)
        self._state = _State.CHUNK_DATA if self._num_left else _State.TRAILER
        return True

    def _take_trailer(self) -> bool:
        line = self._take_line()
        if line is None:
            return False
        if not line:
            self._state = _State.DONE
        return True

    def _take_line(self) -> bytes | None:
        end = self._rest.find(b"\r\n", self._at)
        if end < 0:
            if len(self._rest) - self._at > MAX_CHUNK_LINE_BYTES:
                raise MalformedResponse("a chunk's header is too long")
            return None
        line = self._rest[self._at : end]
        self._at = end + 2
        return line


@lru_cache(maxsize=64)  # many answers of one second have the same
def _parse_head(data: bytes) -> tuple[bytes, ResponseHead]:
    status_line, *lines = data.split(b"\r\n")
    version, _, rest = status_line.partition(b" ")
    status = rest[:3]
    if not version.startswith(b"HTTP/1.") or not status.isdigit() or len(status) != 3:
        raise MalformedResponse(f"not an HTTP/1.1 status line: {status_line[:60]!r}")
    headers: list[tuple[bytes, bytes]] = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip():
            raise MalformedResponse(f"not a header: {line[:60]!r}")
        headers.append((name.lower(), value.strip()))
    return version, ResponseHead(int(status), tuple(headers))


def _parse_number(text: bytes, base: int) -> int:
    try:
        if not text.isalnum():
            raise ValueError
        return int(text, base)
    except ValueError:
        raise _no_length(text) from None


def _no_length(text: bytes) -> MalformedResponse:
    return MalformedResponse(f"not a length: {text[:60]!r}")
