"""ZMQ sockets of the control connection, with the limits both sides rely on."""

import contextlib
import ipaddress

import zmq

from kv_transfer.errors import BindError, SettingsError
from kv_transfer.messages import MAX_MESSAGE_BYTES
from kv_transfer.settings import TransferSettings

LINGER_MS = 200
"""Time a closing socket gets to send its last releases."""

MAX_FRAMES_PER_TURN = 256

WILDCARD_HOSTS = ("0.0.0.0", "*", "[::]", "::")
_UNSPECIFIED = ("0.0.0.0", "::")

LOCAL_HOST = "127.0.0.1"


def control_router(
    context: "zmq.Context[zmq.Socket[bytes]]", settings: TransferSettings
) -> "zmq.Socket[bytes]":
    socket = _control_socket(context, zmq.ROUTER, settings)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return socket


def control_dealer(
    context: "zmq.Context[zmq.Socket[bytes]]", settings: TransferSettings
) -> "zmq.Socket[bytes]":
    socket = _control_socket(context, zmq.DEALER, settings)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, int(settings.connect_timeout_s * 1000))
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    return socket


def _control_socket(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, settings: TransferSettings
) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(settings.heartbeat_interval_s * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(settings.heartbeat_timeout_s * 1000))
    return socket


def bind(socket: "zmq.Socket[bytes]", address: str) -> str:
    """Bind and return the endpoint with its port resolved. `BindError` names the address."""
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise BindError(f"cannot listen on {address}: {error.strerror or error}") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def advertised(endpoint: str, advertise_host: str | None) -> str:
    """The endpoint as peers must write it: a wildcard host is replaced by `advertise_host`."""
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or host not in WILDCARD_HOSTS:
        return endpoint
    if advertise_host is None:
        raise SettingsError(f"{endpoint} listens everywhere: set advertise_host to the host peers must use")
    return f"tcp://{advertise_host}:{port}"


def local_host(bind_address: str) -> str:
    """The address from which this process comes when it connects to its own socket."""
    scheme, _, rest = bind_address.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    try:
        return str(ipaddress.ip_address(host)) if scheme == "tcp" and host not in _UNSPECIFIED else LOCAL_HOST
    except ValueError:
        return LOCAL_HOST  # a name


def receive_all(socket: "zmq.Socket[bytes]", limit: int = MAX_FRAMES_PER_TURN) -> list[list[bytes]]:
    """The messages that are there, at most `limit`, without waiting."""
    received: list[list[bytes]] = []
    with contextlib.suppress(zmq.Again):
        while len(received) < limit:
            received.append(socket.recv_multipart(zmq.NOBLOCK))
    return received
