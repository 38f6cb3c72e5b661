import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.event_stream import MAX_EVENT_BYTES, EventStreamParser, EventStreamTooLong

STREAM = b'data: {"a":1}\n\n: keep-alive\n\ndata:second\nid: 7\n\ndata: x\ndata: y\n\ndata: [last]\n\n'
EVENTS = [b'{"a":1}', b"second", b"x\ny", b"[last]"]


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=6), is_crlf=st.booleans())
def test_events_are_the_same_however_the_bytes_arrive(cuts: list[int], is_crlf: bool) -> None:
    stream = STREAM.replace(b"\n", b"\r\n") if is_crlf else STREAM
    parser, events, start = EventStreamParser(), [], 0
    for cut in [*sorted(cuts), len(stream)]:
        events += parser.push(stream[start:cut])
        start = cut
    assert events == EVENTS


def test_an_endless_event_is_an_error() -> None:
    with pytest.raises(EventStreamTooLong):
        EventStreamParser().push(b"data: " + b"x" * MAX_EVENT_BYTES)
