"""Who may connect to a source's control port: ZMQ asks before it lets a peer say its first word (ZAP)."""

import contextlib
import ipaddress
import logging
from collections.abc import Sequence

import zmq

from kv_transfer.errors import SettingsError

logger = logging.getLogger(__name__)

_ZAP_ENDPOINT, _ZAP_VERSION = "inproc://zeromq.zap.01", b"1.0"
_DOMAIN = "tandem"
_NUM_FIELDS = 6
"""Version, request id, domain, address, identity, mechanism; credentials may follow."""
_MAX_PER_TURN = 256


def parse_networks(texts: Sequence[str]) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    """`SettingsError` names the text that is no network."""
    try:
        return tuple(ipaddress.ip_network(text.strip(), strict=False) for text in texts)
    except ValueError as error:
        raise SettingsError(f"allowed_networks: {error}") from error


class AddressGate:
    """Lets peers of some networks in, and this host itself. Owns a socket, to be served often."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", networks: Sequence[str]) -> None:
        self._networks = parse_networks(networks)
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ENDPOINT)

    def guard(self, socket: "zmq.Socket[bytes]") -> None:
        """Before the socket is bound: whoever connects to it has to pass."""
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)

    def admit(self, own: str) -> None:
        """The address under which this process reaches itself, known once the socket is bound."""
        self._networks += parse_networks((own,))

    def allows(self, address: str) -> bool:
        try:
            peer = ipaddress.ip_address(address)
        except ValueError:
            return False
        mapped = peer.ipv4_mapped if isinstance(peer, ipaddress.IPv6Address) else None
        return any((mapped or peer) in network for network in self._networks)

    def serve(self) -> int:
        """Answer what was asked; returns how many were refused."""
        num_refused = 0
        with contextlib.suppress(zmq.Again):
            for _ in range(_MAX_PER_TURN):
                num_refused += not self._answer(self.socket.recv_multipart(zmq.NOBLOCK))
        return num_refused

    def _answer(self, request: Sequence[bytes]) -> bool:
        """True if it may connect."""
        address = request[3].decode(errors="replace") if len(request) >= _NUM_FIELDS else ""
        is_allowed = self.allows(address)
        if not is_allowed:
            logger.warning("%s may not connect (--control-allow)", address or "a peer without an address")
        status = (b"200", b"OK") if is_allowed else (b"400", b"address not allowed")
        request_id = request[1] if len(request) > 1 else b""
        self.socket.send_multipart([_ZAP_VERSION, request_id, *status, b"", b""])
        return is_allowed

    def close(self) -> None:
        self.socket.close()
