"""The transports by name."""

import logging

from kv_transfer.errors import SettingsError, TransportUnavailable
from kv_transfer.transport import Transport

logger = logging.getLogger(__name__)

TRANSPORT_NAMES = ("auto", "nixl", "zmq", "fake")


NIXL_BACKENDS = ("UCX", "LIBFABRIC")


def make_transport(name: str, nixl_backend: str = "UCX") -> Transport:
    """A fresh transport; `auto` decides for each peer, see `auto.py`.

    `TransportUnavailable` says what to install or which option to set.
    """
    if nixl_backend not in NIXL_BACKENDS:
        raise SettingsError(f"nixl_backend must be one of {', '.join(NIXL_BACKENDS)}, got {nixl_backend!r}")
    if name == "auto":
        from kv_transfer.transports.auto import AutoTransport, Host

        return AutoTransport(_nixl_if_here(nixl_backend), make_transport("zmq"), Host.here())
    if name == "nixl":
        from kv_transfer.transports.nixl import NixlTransport

        return NixlTransport(nixl_backend)
    if name == "zmq":
        from kv_transfer.transports.zmq import ZmqTransport

        return ZmqTransport()
    if name == "fake":
        from kv_transfer.transports.fake import FakeTransport

        return FakeTransport()
    raise SettingsError(f"transport must be one of {', '.join(TRANSPORT_NAMES)}, got {name!r}")


def check_rdma(name: str) -> None:
    """`TransportUnavailable` unless this transport could read over RDMA from this host."""
    from kv_transfer.transports.auto import RDMA_DEVICES, rdma_devices

    if name not in ("auto", "nixl"):
        raise TransportUnavailable(
            f"--require-rdma: --transport {name} does not know RDMA; choose auto or nixl"
        )
    if not rdma_devices():
        raise TransportUnavailable(
            f"--require-rdma: {RDMA_DEVICES} lists no device; load its driver or start with --no-require-rdma"
        )
    make_transport("nixl")


def _nixl_if_here(backend: str) -> Transport | None:
    try:
        return make_transport("nixl", backend)
    except TransportUnavailable as error:
        logger.info("%s", error)
        return None
