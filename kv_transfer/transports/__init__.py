"""The transports by name."""

from kv_transfer.errors import SettingsError, TransportUnavailable
from kv_transfer.transport import Transport

TRANSPORT_NAMES = ("auto", "nixl", "zmq", "fake")


def make_transport(name: str) -> Transport:
    """A fresh transport; `auto` is NIXL where it can be loaded, else ZMQ.

    `TransportUnavailable` says what to install or which option to set. Whoever logs the choice reads it from
    `.name` and `.version`.
    """
    if name == "auto":
        return _nixl_or_zmq()
    if name == "nixl":
        from kv_transfer.transports.nixl import NixlTransport

        return NixlTransport()
    if name == "zmq":
        from kv_transfer.transports.zmq import ZmqTransport

        return ZmqTransport()
    if name == "fake":
        from kv_transfer.transports.fake import FakeTransport

        return FakeTransport()
    raise SettingsError(f"transport must be one of {', '.join(TRANSPORT_NAMES)}, got {name!r}")


def _nixl_or_zmq() -> Transport:
    try:
        return make_transport("nixl")
    except TransportUnavailable:
        return make_transport("zmq")
