"""The control messages between a completion engine's sink and a prompt engine's source.

msgpack, one message per ZMQ frame, tagged by type. Every message bears the source's epoch, because ZMQ
replays queued messages to a restarted server. A peer's bytes are untrusted: sizes are limited by type, and
whatever does not decode is a `MessageError`.

    sink (DEALER)                source (ROUTER)
    Hello                   ->                      protocol version and compatibility fields, nothing else
                            <-   HelloOk | Refused
    Introduce               ->                      who I am, whom I expect, which transport
                            <-   Introduction | Refused
    Want                    ->                      at any time, also before the prompt is computed
                            <-   Grant | Unavailable
                            <-   Announce           more of a granted prompt is computed
    Renew                   ->                      all leases of this peer, every lease_s / 6
                            <-   Renewed            remaining seconds, never a clock reading
    Release                 ->                      done, aborted, or declined: left to another reader
                            <-   Confirm            confirmed only if that generation was valid until now
"""

from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from kv_transfer.errors import MessageError
from kv_transfer.layout import RegionKind
from wire.services import MAX_COMPLETIONS

PROTOCOL_VERSION = 4

MAX_MESSAGE_BYTES = 1 << 20

MAX_REGIONS = 64
"""Of one engine: a KV pool for each of its ranks, and two more."""

MAX_RENEWALS = 4096
"""Leases in one Renew; a sink with more sends several."""

_Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Counter = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Address = Annotated[int, Meta(ge=1, le=2**63 - 1)]
_Name = Annotated[str, Meta(max_length=128)]
_Text = Annotated[str, Meta(max_length=1024)]
_HandoverId = Annotated[str, Meta(min_length=1, max_length=128)]
_Fields = Annotated[dict[_Name, _Text], Meta(max_length=64)]
_Seconds = Annotated[float, Meta(ge=0, le=86400)]
_Blob = Annotated[bytes, Meta(max_length=512 << 10)]
_Digests = Annotated[bytes, Meta(max_length=(512 << 10) + 8)]
_BlockIdBytes = Annotated[bytes, Meta(max_length=512 << 10)]
MAX_PREFIX_TOKENS = (512 << 10) // 4
"""Of a prefix that is to be borrowed."""
_TokenIdBytes = Annotated[bytes, Meta(max_length=4 * MAX_PREFIX_TOKENS)]


class RegionInfo(Struct, frozen=True, array_like=True):
    kind: RegionKind
    address: _Address
    block_bytes: _Counter
    num_blocks: _Count
    device_id: _Count | None = None


class LeaseRef(Struct, frozen=True, array_like=True):
    """`generation` 0: still waiting for the offer."""

    handover_id: _HandoverId
    generation: _Counter


class LeaseTtl(Struct, frozen=True, array_like=True):
    handover_id: _HandoverId
    generation: _Counter
    ttl_s: _Seconds


class ChoiceStart(Struct, frozen=True, array_like=True):
    """A choice that goes on after its first token."""

    choice: Annotated[int, Meta(ge=0, lt=MAX_COMPLETIONS)]
    token_id: _Count


class Hello(Struct, frozen=True, tag=True):
    epoch: _Counter
    protocol: _Count
    compatibility: _Fields


class HelloOk(Struct, frozen=True, tag=True):
    epoch: _Counter


class Refused(Struct, frozen=True, tag=True):
    """`field` differs: `ours` is the sender's value, `theirs` the receiver's."""

    epoch: _Counter
    field: _Name
    ours: _Text
    theirs: _Text


class Introduce(Struct, frozen=True, tag=True):
    epoch: _Counter
    engine_id: _Name
    """Whom the reader expects to find."""
    reader_engine_id: _Name
    reader_epoch: _Counter
    transport: _Name
    transport_version: _Name


class Introduction(Struct, frozen=True, tag=True):
    epoch: _Counter
    engine_id: _Name
    transport: _Name
    transport_version: _Name
    blob: _Blob
    """The transport's own address of the registered memory."""
    regions: Annotated[list[RegionInfo], Meta(max_length=MAX_REGIONS)]
    lease_s: _Seconds


class Prefix(Struct, frozen=True, array_like=True):
    """Whatever the source has cached of these tokens from `first_token` on."""

    token_ids: _TokenIdBytes
    """int32, little-endian."""
    first_token: _Count
    cache_salt: _Text


class Want(Struct, frozen=True, tag=True):
    """With a prefix: to borrow cached blocks, under an id that the reader makes up."""

    epoch: _Counter
    handover_id: _HandoverId
    prefix: Prefix | None = None


class Ending(Struct, frozen=True, array_like=True):
    """The whole prompt is computed. Borrowed blocks come without first tokens."""

    state_slot: _Count | None
    first_tokens: Annotated[tuple[ChoiceStart, ...], Meta(max_length=MAX_COMPLETIONS)]
    digests: _Digests = b""
    """Of the prompt's tokens, then of the state row; empty where the source does not compute them."""


class Grant(Struct, frozen=True, tag=True):
    """KV of the prompt's first blocks is computed, and pinned for `ttl_s` seconds; read it under this
    `generation`. With `ending` these are all its blocks, else more are announced as they are computed."""

    epoch: _Counter
    handover_id: _HandoverId
    generation: _Counter
    ttl_s: _Seconds
    num_tokens: _Count
    """Of the whole prompt."""
    block_ids: _BlockIdBytes
    """int32, little-endian."""
    ending: Ending | None


class Announce(Struct, frozen=True, tag=True):
    """More blocks of a granted prompt: those from number `first_block` on, under the same lease."""

    epoch: _Counter
    handover_id: _HandoverId
    generation: _Counter
    first_block: _Count
    block_ids: _BlockIdBytes
    ending: Ending | None


class Unavailable(Struct, frozen=True, tag=True):
    """`generation` 0: there was no grant; else that grant is void."""

    epoch: _Counter
    handover_id: _HandoverId
    generation: _Counter
    reason: Literal["withdrawn", "expired", "released", "abandoned", "superseded", "refused"]


class Renew(Struct, frozen=True, tag=True):
    epoch: _Counter
    sequence: _Counter
    leases: Annotated[list[LeaseRef], Meta(max_length=MAX_RENEWALS)]


class Renewed(Struct, frozen=True, tag=True):
    """Answers `sequence`; a lease that was asked for and is not listed is gone."""

    epoch: _Counter
    sequence: _Counter
    leases: Annotated[list[LeaseTtl], Meta(max_length=MAX_RENEWALS)]


Outcome = Literal["done", "aborted", "declined"]


class Release(Struct, frozen=True, tag=True):
    """`generation` 0: whatever you granted me, or may be about to. `declined`: another reader may take it."""

    epoch: _Counter
    handover_id: _HandoverId
    generation: _Counter
    outcome: Outcome


class Confirm(Struct, frozen=True, tag=True):
    epoch: _Counter
    handover_id: _HandoverId
    generation: _Counter
    confirmed: bool
    reason: Literal["released", "abandoned", "expired", "withdrawn", "superseded", "unknown"]


ToSource: TypeAlias = Hello | Introduce | Want | Renew | Release
ToSink: TypeAlias = HelloOk | Refused | Introduction | Grant | Announce | Unavailable | Renewed | Confirm

_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_to_source = msgspec.msgpack.Decoder(ToSource)
_to_sink = msgspec.msgpack.Decoder(ToSink)


def encode(message: ToSource | ToSink) -> bytes:
    return _encoder.encode(message)


def decode_to_source(data: bytes) -> ToSource:
    """`MessageError` for anything that is not one whole valid message."""
    return _decode(_to_source, data)


def decode_to_sink(data: bytes) -> ToSink:
    """`MessageError` for anything that is not one whole valid message."""
    return _decode(_to_sink, data)


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"a control message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise MessageError(f"not a control message: {error}") from error
