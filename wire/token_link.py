"""One connection between a proxy and a completion engine's service that carries the tokens of all streams.

`POST /v1/link`: the request's body and the response's body are open together, and both consist of frames:
four bytes of length (big endian) and so many bytes of msgpack.

    proxy                       service
    OpenStream            ->                      a `CompletionRequest` under a number of the proxy's
                          <-   [StreamPart]       first either `is_accepted` or an error: the status line
                          <-   [StreamPart]       the tokens of one step, of every stream that has some
    CloseStream           ->                      nobody wants more: abort; unknown numbers are ignored. What
                                                  is not taken over stays with the prompt engine
                          <-   [StreamPart]       of stream LINK, first in its frame: the engine leaves soon
                          <-   []                 at least every BEAT_S: the service lives

A stream's parts mean what `CompletionEvent` says; `POST /v1/completion` carries the same as SSE, one stream
at a time.
"""

import struct
from collections.abc import Iterator

import msgspec

from wire.services import FinishReason, OutputToken, PromptLogprobs, ServiceError, TokenLogprobs

LINK_PATH = "/v1/link"
BEAT_S = 1.0
LINK = 0
"""The number of no stream: such a part is about the link itself."""
MAX_FRAME_BYTES = 64 << 20

_LENGTH = struct.Struct(">I")


class OpenStream(msgspec.Struct, frozen=True, tag=True):
    stream: int
    request: msgspec.Raw
    """A `CompletionRequest`: decoded by itself, so that a bad one ends its own stream and no other."""


class CloseStream(msgspec.Struct, frozen=True, tag=True):
    stream: int


class StreamPart(msgspec.Struct, frozen=True, array_like=True):
    """What one step, or an end, means for one choice of one stream."""

    stream: int
    choice: int = 0
    first_index: int = 0
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One for each token; None where the request wants none."""
    is_accepted: bool = False
    error: ServiceError | None = None
    """Ends the stream."""
    error_status: int | None = None
    leaves_in_s: float | None = None
    """Of LINK: nothing new is taken, and what is open then will be cut."""
    prompt_logprobs: PromptLogprobs | None = None

    def tokens(self) -> tuple[OutputToken, ...]:
        if self.logprobs is None and len(self.token_ids) == 1:  # a step brings little else
            return (OutputToken(index=self.first_index, token_id=self.token_ids[0]),)
        logprobs = self.logprobs or (None,) * len(self.token_ids)
        return tuple(
            OutputToken(index=self.first_index + place, token_id=token_id, logprobs=logprobs[place])
            for place, token_id in enumerate(self.token_ids)
        )


ToService = OpenStream | CloseStream


class FrameTooLong(Exception):
    """A peer that announces such a frame speaks another protocol."""


class FrameSplitter:
    """Cuts what a socket gives into frames."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        """Of a frame, or of its length, that is not complete."""
        self._num_missing = 0

    def push(self, data: bytes) -> Iterator[bytes]:
        """The frames that are complete now, in order; raises `FrameTooLong`."""
        self._pieces.append(data)
        self._num_missing -= len(data)
        if self._num_missing > 0:  # a long frame is put together once, not at every piece of it
            return
        buffer = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        start, num_needed = 0, _LENGTH.size
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                raise FrameTooLong(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + length
            if end > len(buffer):
                num_needed += length
                break
            yield buffer[start + _LENGTH.size : end]
            start = end
        self._pieces = [buffer[start:]] if start < len(buffer) else []
        self._num_missing = num_needed - (len(buffer) - start)


_encoder = msgspec.msgpack.Encoder()
_to_service: msgspec.msgpack.Decoder[ToService] = msgspec.msgpack.Decoder(ToService)
_to_proxy = msgspec.msgpack.Decoder(tuple[StreamPart, ...])


def frame(message: ToService | list[StreamPart]) -> bytes:
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


def open_stream_frame(stream: int, request: object) -> bytes:
    return frame(OpenStream(stream, msgspec.Raw(_encoder.encode(request))))


def decode_to_service(data: bytes) -> ToService:
    """`msgspec.MsgspecError` for anything else."""
    return _to_service.decode(data)


def decode_to_proxy(data: bytes) -> tuple[StreamPart, ...]:
    """`msgspec.MsgspecError` for anything else."""
    return _to_proxy.decode(data)
