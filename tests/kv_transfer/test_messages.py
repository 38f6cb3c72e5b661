import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.errors import MessageError
from kv_transfer.messages import (
    MAX_MESSAGE_BYTES,
    Announce,
    ChoiceStart,
    Confirm,
    Ending,
    Grant,
    Hello,
    HelloOk,
    Introduce,
    Introduction,
    LeaseRef,
    LeaseTtl,
    Prefix,
    Refused,
    RegionInfo,
    Release,
    Renew,
    Renewed,
    ToSink,
    ToSource,
    Unavailable,
    Want,
    decode_to_sink,
    decode_to_source,
    encode,
)
from tests.kv_transfer.builders import Pair, offer

TO_SOURCE: list[ToSource] = [
    Hello(1, 1, {"block_size": "4"}),
    Introduce(1, "prompt-0", "completion-0", 9, "fake", "1"),
    Want(1, "h"),
    Want(1, "h", Prefix(b"\5\0\0\0\6\0\0\0", 1, "salt")),
    Renew(1, 7, [LeaseRef("h", 3)]),
    Release(1, "h", 3, "done"),
    Release(1, "h", 0, "declined"),
]
TO_SINK: list[ToSink] = [
    HelloOk(1),
    Refused(1, "dtype", "float16", "float32"),
    Introduction(1, "prompt-0", "fake", "1", b"blob", [RegionInfo("kv", 4096, 64, 8)], 10.0),
    Grant(1, "h", 3, 10.0, 6, b"\3\0\0\0\5\0\0\0", Ending(None, (ChoiceStart(0, 42), ChoiceStart(2, 7)))),
    Grant(1, "h", 3, 10.0, 6, b"\3\0\0\0", None),
    Announce(1, "h", 3, 1, b"\5\0\0\0", Ending(2, (ChoiceStart(0, 42),))),
    Unavailable(1, "h", 3, "withdrawn"),
    Renewed(1, 7, [LeaseTtl("h", 3, 10.0)]),
    Confirm(1, "h", 3, True, "released"),
]


@pytest.mark.parametrize("message", TO_SOURCE)
def test_messages_to_the_source_survive_the_wire(message: ToSource) -> None:
    assert decode_to_source(encode(message)) == message


@pytest.mark.parametrize("message", TO_SINK)
def test_messages_to_the_sink_survive_the_wire(message: ToSink) -> None:
    assert decode_to_sink(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Want(-1, "h"),
        Want(1, ""),
        Want(1, "h" * 129),
        Hello(1, 1, {str(index): "" for index in range(65)}),
        Hello(1, 1, {"model": "x" * 1025}),
        Renew(1, 1, [LeaseRef("h", 1)] * 4097),
        Release(1, "h", 2**63, "done"),
    ],
)
def test_values_over_a_limit_are_refused(message: ToSource) -> None:
    with pytest.raises(MessageError):
        decode_to_source(encode(message))


@pytest.mark.parametrize("starts", [((8, 42),), ((-1, 42),), ((0, -1),), ((0, 42),) * 9])
def test_a_grant_with_too_many_choices_or_with_impossible_ones_is_refused(
    starts: tuple[tuple[int, int], ...],
) -> None:
    first_tokens = tuple(ChoiceStart(*start) for start in starts)
    with pytest.raises(MessageError):
        decode_to_sink(encode(Grant(1, "h", 3, 10.0, 6, b"\3\0\0\0\5\0\0\0", Ending(None, first_tokens))))


def test_message_over_the_size_limit_is_refused_unread() -> None:
    with pytest.raises(MessageError, match="over the limit"):
        decode_to_source(b"\0" * (MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x91" * 100_000, b"\x81\xa4type\xa4Want", b"\xdf\xff\xff\xff\xff"]
)
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    for decode in (decode_to_source, decode_to_sink):
        with pytest.raises(MessageError):
            decode(data)


def test_unknown_fields_of_a_newer_peer_are_ignored() -> None:
    fields = msgspec.msgpack.decode(encode(Want(1, "h")))
    assert decode_to_source(msgspec.msgpack.encode(fields | {"priority": 3})) == Want(1, "h")


def mangled(valid: bytes) -> st.SearchStrategy[bytes]:
    """`valid` with a stretch of it replaced."""
    return st.builds(
        lambda start, length, middle: valid[:start] + middle + valid[start + length :],
        st.integers(0, len(valid)),
        st.integers(0, 8),
        st.binary(max_size=8),
    )


def frames(messages: list[ToSource] | list[ToSink]) -> st.SearchStrategy[list[bytes]]:
    one = st.one_of(st.binary(max_size=64), *(mangled(encode(message)) for message in messages))
    return st.lists(one, max_size=2)


@given(st.lists(frames(TO_SOURCE), max_size=8))
def test_source_survives_any_bytes(messages: list[list[bytes]]) -> None:
    pair = Pair()
    pair.run()
    pair.offer()
    for message in messages:
        pair.source.on_frames(b"reader-0", message, pair.now_s)
        pair.source.on_frames(b"stranger", message, pair.now_s)
        pair.source.ledger.check_invariants()


@given(st.lists(frames(TO_SINK), max_size=8))
def test_sink_survives_any_bytes(messages: list[list[bytes]]) -> None:
    pair = Pair()
    pair.reader.request()
    pair.run()
    pair.reader.request("k")
    pair.offer(offer())
    for message in messages:
        pair.reader.session.on_frames(message, pair.now_s)
        pair.reader.session.poll(pair.now_s)
        pair.reader.session.tick(pair.now_s)
        pair.reader.session.check_invariants()
