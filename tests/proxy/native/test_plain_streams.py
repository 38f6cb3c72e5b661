"""The compiled path against the one in Python, which does the same for one token at a time."""

import weakref
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.detokenizer import Vocabulary
from proxy.native import loading
from proxy.native.loading import Outlet, PlainStream, PlainStreams, Words
from proxy.openai_responses import ResponseBuilder
from proxy.text_stream import TextStream
from tests.proxy.builders import END_ID, TOKENIZER, ids
from wire.json_body import to_json
from wire.services import OutputToken, ServiceError
from wire.token_link import StreamPart, decode_to_proxy, frame

pytestmark = pytest.mark.skipif(not loading.IS_COMPILED, reason=f"nothing compiled: {loading.REASON}")

BEFORE, AFTER = b'data: {"text":"', b'"}\n\n'
NOTHING = b""


VOCABULARY = Vocabulary(TOKENIZER)


def words() -> Words:
    return VOCABULARY.words()


def stream(put: list[bytes] | None = None, outlet: Outlet | None = None, next_index: int = 0) -> PlainStream:
    return PlainStream(
        words(),
        choice=0,
        next_index=next_index,
        last_s=0.0,
        before=BEFORE,
        after=AFTER,
        outlet=outlet,
        put=None if put is None else put.append,
    )


def streams(**by_number: PlainStream) -> PlainStreams:
    """Named s1, s2, ..."""
    some = PlainStreams()
    for name, one in by_number.items():
        some.add(int(name[1:]), one)
    return some


def encoded(*parts: StreamPart) -> bytes:
    return frame(list(parts))[4:]


def text(number: int, first_index: int, content: str) -> StreamPart:
    return StreamPart(number, first_index=first_index, token_ids=tuple(ids(content)))


def event(content: str) -> bytes:
    return BEFORE + to_json(content)[1:-1] + AFTER


def test_the_parts_of_a_frame_become_one_event_each_and_one_write_for_each_stream() -> None:
    first, second = list[bytes](), list[bytes]()
    some = streams(s1=stream(first), s2=stream(second))
    assert some.take(encoded(text(1, 0, "a"), text(2, 0, "b"), text(1, 1, "cd")), 0.5) == NOTHING
    assert not first, "nothing leaves before all that came is dealt with"
    assert some.flush() == [0.5, 0.5, 0.0]
    assert first == [event("a") + event("cd")]
    assert second == [event("b")]
    assert some.flush() == []


def test_events_are_written_as_chunks_while_the_outlet_is_free_and_put_otherwise() -> None:
    written, put = list[bytes](), list[bytes]()
    outlet = Outlet(written.append)
    some = streams(s1=stream(put, outlet))

    def push(index: int, content: str) -> None:
        assert some.take(encoded(text(1, index, content)), 0.0) == NOTHING
        some.flush()

    push(0, "a")
    outlet.is_paused = True
    push(1, "b")
    outlet.is_paused, outlet.is_behind = False, True
    push(2, "c")
    outlet.is_behind = False
    push(3, "d")
    assert written == [b"%x\r\n%b\r\n" % (len(event(one)), event(one)) for one in "ad"]
    assert put == [event("b"), event("c")]


def test_without_a_taker_of_events_the_text_is_kept() -> None:
    kept = stream()
    some = streams(s1=kept)
    some.take(encoded(text(1, 0, "a\n"), text(1, 2, "é🙂")), 0.0)
    assert (kept.text, kept.num_tokens, kept.next_index) == ("a\né🙂", 8, 8)
    assert kept.token_ids == ids("a\né🙂")


@pytest.mark.parametrize(
    "part",
    [
        text(1, 2, "x"),
        StreamPart(1, first_index=1, token_ids=(7,), finish_reason="length"),
        StreamPart(1, first_index=1, token_ids=(7,), logprobs=(None,)),
        StreamPart(1, choice=1, first_index=1, token_ids=(7,)),
        StreamPart(1, first_index=1),
        StreamPart(1, first_index=1, token_ids=(7, 1 << 40)),
        StreamPart(1, error=ServiceError(message="m", type="server_error", code="c")),
    ],
)
def test_a_part_that_is_not_plain_is_left_and_nothing_overtakes_it(part: StreamPart) -> None:
    put, other = list[bytes](), list[bytes]()
    one = stream(put)
    some = streams(s1=one, s2=stream(other))
    behind = text(1, 1, "y")
    rest = some.take(encoded(text(1, 0, "a"), part, text(2, 0, "b"), behind), 0.0)
    some.flush()
    assert decode_to_proxy(rest) == (part, behind)
    assert (put, other) == ([event("a")], [event("b")])
    assert one.next_index == 1


def test_parts_of_unknown_streams_and_of_the_link_are_left() -> None:
    parts = (StreamPart(0, leaves_in_s=1.0), text(9, 0, "a"), StreamPart(3, is_accepted=True))
    assert decode_to_proxy(streams(s1=stream([])).take(encoded(*parts), 0.0)) == parts


def test_a_stream_that_is_told_to_stop_takes_no_more() -> None:
    put = list[bytes]()
    one = stream(put)
    some = streams(s1=one)
    one.stop()
    assert decode_to_proxy(some.take(encoded(text(1, 0, "a")), 0.0)) == (text(1, 0, "a"),)
    assert not put


def test_what_was_taken_leaves_before_a_stream_is_removed() -> None:
    put = list[bytes]()
    some = streams(s1=stream(put))
    some.take(encoded(text(1, 0, "a")), 0.0)
    some.remove(1)
    assert put == [event("a")]
    assert decode_to_proxy(some.take(encoded(text(1, 1, "b")), 0.0)) == (text(1, 1, "b"),)
    some.remove(1)
    assert put == [event("a")]


def test_a_frame_that_is_no_frame_is_left_whole() -> None:
    whole = encoded(text(1, 0, "abc"))
    for cut in range(len(whole)):
        one = stream([])
        assert streams(s1=one).take(whole[:cut], 0.0) == whole[:cut]
        assert one.next_index == 0
    assert streams(s1=stream([])).take(whole + b"\x00", 0.0) == whole + b"\x00"


@given(data=st.binary(max_size=60))
def test_any_bytes_are_left_or_are_tokens(data: bytes) -> None:
    one = stream([])
    rest = streams(s1=one).take(data, 0.0)
    try:
        parts = decode_to_proxy(data)
    except msgspec.MsgspecError:
        assert rest == data or one.num_tokens
    else:
        left = decode_to_proxy(rest) if rest else ()
        assert len(left) + (one.next_index > 0) >= min(len(parts), 1)


@given(runs=st.lists(st.lists(st.integers(0, END_ID), min_size=1, max_size=4), max_size=12))
def test_events_are_those_of_python(runs: Sequence[Sequence[int]]) -> None:
    """Over parts of characters, garbage and special tokens."""
    chunks = ResponseBuilder("chat", "id", "model", 1).content_chunks(0)
    expected, python = b"", TextStream(Vocabulary(TOKENIZER))
    put, index = list[bytes](), 0
    before, after = chunks.around
    one = PlainStream(
        words(), choice=0, next_index=0, last_s=0.0, before=before, after=after, outlet=None, put=put.append
    )
    some = streams(s1=one)
    for run in runs:
        part = StreamPart(1, first_index=index, token_ids=tuple(run))
        index += len(run)
        content = python.push_text(part.tokens())
        expected += chunks.chunk(content) if content else b""
        assert some.take(encoded(part), 0.0) == NOTHING
    some.flush()
    assert b"".join(put) == expected
    end = TextStream(Vocabulary(TOKENIZER))
    end.resume(one.num_tokens, one.pending)
    last = (OutputToken(index=index, token_id=ids("z")[0]),)
    assert end.push(last, "length") == python.push(last, "length")


def test_a_part_whose_text_cannot_be_made_leaves_nothing_behind() -> None:
    def lookup(token_id: int) -> tuple[bytes, bytes]:
        if token_id == 2:
            raise MemoryError
        return b"a", b'"a"'

    put = list[bytes]()
    one = PlainStream(
        Words(lookup, to_json, 10),
        choice=0,
        next_index=0,
        last_s=0.0,
        before=BEFORE,
        after=AFTER,
        outlet=None,
        put=put.append,
    )
    some = streams(s1=one)
    with pytest.raises(MemoryError):
        some.take(encoded(StreamPart(1, token_ids=(1, 2))), 0.0)
    some.remove(1)
    assert (put, one.token_ids, one.next_index) == ([], [], 0)


def test_a_table_of_words_does_not_keep_its_vocabulary() -> None:
    vocabulary = Vocabulary(TOKENIZER)
    vocabulary.words()
    alive = weakref.ref(vocabulary)
    del vocabulary
    assert alive() is None


def test_a_failing_client_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(data: bytes) -> None:
        raise OSError("gone")

    put, failures = list[bytes](), list[object]()
    monkeypatch.setattr("sys.unraisablehook", lambda failure: failures.append(failure.exc_value))
    some = streams(s1=stream([], Outlet(fail)), s2=stream(put))
    some.take(encoded(text(1, 0, "a"), text(2, 0, "b")), 0.0)
    some.flush()
    some.take(encoded(text(1, 1, "c")), 0.0)
    some.remove(1)
    assert [str(failure) for failure in failures] == ["gone", "gone"]
    assert put == [event("b")]
