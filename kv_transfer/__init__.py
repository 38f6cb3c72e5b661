"""Moves a prompt's KV blocks and state slot from a prompt engine to a completion engine.

`HandoverSource` and `HandoverSink` are what an engine uses; a `Transport` moves the bytes. Protocol, leases
and fences: `messages.py`, `source_ledger.py`, `sink_ledger.py`, each of which opens with its lifecycle.
"""

from kv_transfer.events import Arrived, Failed, Offered, Reclaimable, Released, SinkEvent, SourceEvent
from kv_transfer.layout import Identity, Region, compatibility_hash
from kv_transfer.memory import HugePageRegion
from kv_transfer.offers import Announcement, Offer
from kv_transfer.settings import TransferSettings
from kv_transfer.sink import HandoverSink
from kv_transfer.source import HandoverSource
from kv_transfer.transport import Transport
from kv_transfer.transports import TRANSPORT_NAMES, make_transport

__all__ = [
    "TRANSPORT_NAMES",
    "Announcement",
    "Arrived",
    "Failed",
    "HandoverSink",
    "HandoverSource",
    "HugePageRegion",
    "Identity",
    "Offer",
    "Offered",
    "Reclaimable",
    "Region",
    "Released",
    "SinkEvent",
    "SourceEvent",
    "TransferSettings",
    "Transport",
    "compatibility_hash",
    "make_transport",
]
