"""The source's side of every peer's conversation: hello in two phases, then the ledger."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kv_transfer.errors import MessageError
from kv_transfer.events import Asked, SourceEvent
from kv_transfer.layout import Identity, Region, first_difference
from kv_transfer.messages import (
    PROTOCOL_VERSION,
    Hello,
    HelloOk,
    Introduce,
    Introduction,
    Refused,
    RegionInfo,
    Release,
    Renew,
    ToSource,
    Want,
    decode_to_source,
)
from kv_transfer.settings import TransferSettings
from kv_transfer.source_handover import ReaderId
from kv_transfer.source_ledger import Send, SourceLedger
from kv_transfer.stats import SourceCounters


@dataclass(frozen=True, slots=True)
class Served:
    """What the hello says about this source's memory."""

    transport: str
    transport_version: str
    blob: bytes
    regions: tuple[Region, ...]


NOT_INTRODUCED = ""

_OWN_FIELDS = ("protocol", "epoch", "session", "engine_id", "transport")


class SourceProtocol:
    """Takes frames, answers through `send`; the peers' bytes never make it raise."""

    def __init__(
        self,
        identity: Identity,
        served: Served,
        settings: TransferSettings,
        send: Send,
        emit: Callable[[SourceEvent], None],
    ) -> None:
        self._identity = identity
        self._served = served
        self._settings = settings
        self._send = send
        self._emit = emit
        self.counters = SourceCounters()
        self.ledger = SourceLedger(identity, settings, self.counters, send, emit, self._name_of)
        self._peers: OrderedDict[ReaderId, str] = OrderedDict()
        """Compatible readers, least recently heard first, and their engine ids once they are introduced."""

    @property
    def num_peers(self) -> int:
        return len(self._peers)

    def _name_of(self, reader: ReaderId) -> str:
        return self._peers.get(reader, NOT_INTRODUCED) or "gone"

    def on_frames(self, reader: ReaderId, frames: Sequence[bytes], now_s: float) -> None:
        try:
            if len(frames) != 1:
                raise MessageError(f"a message of {len(frames)} frames")
            message = decode_to_source(frames[0])
        except MessageError:
            self.counters.ignored["invalid"] += 1
            return
        self._dispatch(reader, message, now_s)

    def _dispatch(self, reader: ReaderId, message: ToSource, now_s: float) -> None:
        if isinstance(message, Hello):
            self._on_hello(reader, message)
        elif isinstance(message, Introduce):
            self._on_introduce(reader, message)
        elif message.epoch != self._identity.epoch:
            self.counters.ignored["stale"] += 1
            self._refuse(reader, "epoch", str(self._identity.epoch), str(message.epoch))
        elif not self._peers.get(reader, NOT_INTRODUCED):
            self.counters.ignored["hello"] += 1
            self._refuse(reader, "session", "unknown", "open")
        else:
            self._peers.move_to_end(reader)
            if isinstance(message, Want):
                self._on_want(reader, message, now_s)
            elif isinstance(message, Renew):
                self.ledger.renew(reader, message, now_s)
            elif isinstance(message, Release):
                self.ledger.release(reader, message, now_s)

    def _on_want(self, reader: ReaderId, message: Want, now_s: float) -> None:
        prefix = message.prefix
        if prefix is None:
            self.ledger.want(reader, message, now_s)
        elif len(prefix.token_ids) % 4 or prefix.first_token * 4 > len(prefix.token_ids):
            self.counters.ignored["invalid"] += 1
        elif self.ledger.want(reader, message, now_s):
            tokens = np.frombuffer(prefix.token_ids, dtype="<i4").astype(np.int32)
            self._emit(Asked(message.handover_id, tokens, prefix.first_token, prefix.cache_salt))

    def _on_hello(self, reader: ReaderId, message: Hello) -> None:
        if message.protocol != PROTOCOL_VERSION:
            self._refuse(reader, "protocol", str(PROTOCOL_VERSION), str(message.protocol))
            return
        difference = first_difference(self._identity.compatibility, message.compatibility)
        if difference is not None:
            self._refuse(reader, *difference)
            return
        self._peers[reader] = self._peers.pop(reader, NOT_INTRODUCED)
        if len(self._peers) > self._settings.max_peers:
            self._forget_a_peer()
        self._send(reader, HelloOk(self._identity.epoch))

    def _forget_a_peer(self) -> None:
        """Of those that only said hello, if there are any, whoever was heard of longest ago."""
        strangers = (reader for reader, name in self._peers.items() if name == NOT_INTRODUCED)
        del self._peers[next(strangers, next(iter(self._peers)))]

    def _on_introduce(self, reader: ReaderId, message: Introduce) -> None:
        if reader not in self._peers:
            self.counters.ignored["hello"] += 1
            self._refuse(reader, "session", "unknown", "open")
            return
        identity, served = self._identity, self._served
        for field, ours, theirs in (
            ("engine_id", identity.engine_id, message.engine_id),
            ("epoch", str(identity.epoch), str(message.epoch)),
            ("transport", served.transport, message.transport),
        ):
            if ours != theirs:
                self._refuse(reader, field, ours, theirs)
                return
        self._peers[reader] = message.reader_engine_id or "unnamed"
        self._send(
            reader,
            Introduction(
                epoch=identity.epoch,
                engine_id=identity.engine_id,
                transport=served.transport,
                transport_version=served.transport_version,
                blob=served.blob,
                regions=[
                    RegionInfo(r.kind, r.address, r.block_bytes, r.num_blocks, r.device_id)
                    for r in served.regions
                ],
                lease_s=self._settings.lease_s,
            ),
        )

    def _refuse(self, reader: ReaderId, field: str, ours: str, theirs: str) -> None:
        # Peers name fields as they like; those that we do not have are one.
        is_known = field in _OWN_FIELDS or field in self._identity.compatibility
        self.counters.refusals[field if is_known else "other"] += 1
        self._send(reader, Refused(self._identity.epoch, field, ours[:1024], theirs[:1024]))
