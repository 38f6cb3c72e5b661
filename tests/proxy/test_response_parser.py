import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.response_parser import MAX_HEAD_BYTES, MalformedResponse, ResponseParser

SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Name:  v \r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\n"
    b"HTTP/1.1 503 Busy\r\ntransfer-encoding: chunked\r\n\r\n"
    b"3\r\nhel\r\n2;ext=1\r\nlo\r\n0\r\ntrailer: x\r\n\r\n"
)
UNTIL_CLOSE = b"HTTP/1.0 200 OK\r\n\r\nhello"


def parse(pieces: list[bytes]) -> tuple[ResponseParser, bytes]:
    parser, body = ResponseParser(), b""
    for piece in pieces:
        body += parser.feed(piece)
    return parser, body


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(min(place, len(data)) for place in places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(bounds)]


@given(places=st.lists(st.integers(0, 200), max_size=8))
@pytest.mark.parametrize(("data", "status"), [(SIZED, 200), (CHUNKED, 503)])
def test_a_response_is_the_same_however_it_is_cut(data: bytes, status: int, places: list[int]) -> None:
    parser, body = parse(cut(data, places))
    assert parser.head is not None
    assert (parser.head.status, body) == (status, b"hello")
    assert parser.is_complete
    assert parser.is_reusable


def test_headers_are_lower_case_and_stripped() -> None:
    parser, _ = parse([SIZED])
    assert parser.head is not None
    assert parser.head.header(b"x-name") == b"v"
    assert parser.head.header(b"missing") is None


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    parser, body = parse([UNTIL_CLOSE])
    assert (body, parser.is_complete, parser.is_reusable) == (b"hello", False, False)
    parser.feed_eof()
    assert parser.is_complete


def test_connection_close_is_respected() -> None:
    parser, _ = parse([b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nConnection: Close\r\n\r\n"])
    assert (parser.is_complete, parser.is_reusable) == (True, False)


@pytest.mark.parametrize("status", [b"204", b"304"])
def test_some_statuses_have_no_body(status: bytes) -> None:
    assert parse([b"HTTP/1.1 " + status + b" x\r\n\r\n"])[0].is_complete


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 20\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nname : x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1_0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1" * 2000,
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * MAX_HEAD_BYTES,
        SIZED + b"more",
    ],
)
def test_nonsense_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedResponse):
        parse([data])


@given(length=st.integers(0, len(CHUNKED) - 1))
def test_a_response_cut_short_is_an_error(length: int) -> None:
    parser, _ = parse([CHUNKED[:length]])
    with pytest.raises(MalformedResponse):
        parser.feed_eof()
