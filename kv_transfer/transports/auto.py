"""NIXL where it reads without TCP, else ZMQ: chosen for each pair of processes when they meet.

UCX over TCP aborts the *source* process in about one of eight cases in which a reader dies or cuts a read
(docs/decisions). So a source serves both transports, and a sink takes NIXL only to a process on its own host,
or where both hosts have an RDMA device.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kv_transfer.errors import ReadError, TransferError
from kv_transfer.layout import Region
from kv_transfer.transport import Connection, RemoteMemory, Transport

logger = logging.getLogger(__name__)

RDMA_DEVICES = Path("/sys/class/infiniband")

_SAME_HOST_LANES = {"all", "cma", "sm", "shm", "xpmem", "knem"}


@dataclass(frozen=True, slots=True)
class Host:
    """What decides whether two processes can copy from each other, or read over RDMA."""

    name: str
    """Equal only for processes that may read each other's memory through the kernel."""
    has_rdma: bool

    @classmethod
    def here(cls) -> "Host":
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user")]
        return cls(" ".join([boot_id, *spaces]), bool(rdma_devices()))


class _Blob(Struct, frozen=True, array_like=True):
    host: Annotated[str, Meta(max_length=256)]
    has_rdma: bool
    nixl: Annotated[bytes, Meta(max_length=256 << 10)]
    """Empty where the source has no NIXL."""
    zmq: Annotated[bytes, Meta(max_length=1024)]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Blob).decode


def rdma_devices(directory: Path | None = None) -> tuple[str, ...]:
    directory = directory or RDMA_DEVICES
    return tuple(sorted(path.name for path in directory.iterdir())) if directory.is_dir() else ()


def copies_on_one_host(ucx_tls: str | None) -> bool:
    """Whether this value of UCX_TLS leaves UCX a same-host copy."""
    if not ucx_tls:
        return True
    names = set(ucx_tls.removeprefix("^").split(","))
    return not names & _SAME_HOST_LANES if ucx_tls.startswith("^") else bool(names & _SAME_HOST_LANES)


class AutoTransport:
    name = "auto"

    def __init__(self, nixl: Transport | None, zmq: Transport, host: Host) -> None:
        self._nixl = nixl
        self._zmq = zmq
        self._host = host

    @property
    def version(self) -> str:
        nixl = "no nixl" if self._nixl is None else f"nixl {self._nixl.version}"
        return f"{nixl}, zmq {self._zmq.version}"

    def register(self, regions: Sequence[Region], serve_at: str | None) -> bytes:
        nixl_blob = self._register_nixl(regions, serve_at)
        zmq_blob = self._zmq.register(regions, serve_at)
        return _encode(_Blob(self._host.name, self._host.has_rdma, nixl_blob, zmq_blob))

    def connect(self, memory: RemoteMemory, regions: Sequence[Region] | None = None) -> Connection:
        try:
            blob = _decode(memory.blob)
        except msgspec.MsgspecError as error:
            raise ReadError(f"the source's address is not valid: {error}") from error
        if self._nixl is not None and blob.nixl and self._reads_without_tcp(blob):
            try:
                return self._nixl.connect(replace(memory, blob=blob.nixl), regions)
            except ReadError as error:
                logger.warning("%s: ZMQ is used to %s", error, memory.host_address)
        return self._zmq.connect(replace(memory, blob=blob.zmq), regions)

    def close(self) -> None:
        for transport in (self._nixl, self._zmq):
            if transport is not None:
                transport.close()

    def _register_nixl(self, regions: Sequence[Region], serve_at: str | None) -> bytes:
        if self._nixl is None:
            return b""
        try:
            return self._nixl.register(regions, serve_at)
        except TransferError as error:
            logger.warning("%s; going on with ZMQ alone", error)
            self._nixl = None
            return b""

    def _reads_without_tcp(self, blob: _Blob) -> bool:
        is_same_host = blob.host == self._host.name and copies_on_one_host(os.environ.get("UCX_TLS"))
        return is_same_host or (blob.has_rdma and self._host.has_rdma)
