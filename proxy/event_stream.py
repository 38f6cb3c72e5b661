"""Splits a `text/event-stream` of data-only events into their data."""

MAX_EVENT_BYTES = 4 << 20


class EventStreamTooLong(Exception):
    """An event grew past the limit; whatever sends this does not speak our protocol."""


class EventStreamParser:
    """Fed with what the socket gives; comment lines and other fields are skipped."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, chunk: bytes) -> list[bytes]:
        """The data of the events that are complete now, in order."""
        buffer = self._rest + chunk if self._rest else chunk
        if b"\r" in buffer:
            buffer = buffer.replace(b"\r\n", b"\n")
        *events, self._rest = buffer.split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventStreamTooLong(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        return [data for event in events if (data := _data_of(event))]


def _data_of(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = (line for line in event.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)
