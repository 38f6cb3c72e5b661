"""The control connection from a sink to one prompt engine process."""

import zmq
from zmq.utils.monitor import recv_monitor_message

from kv_transfer.events import FailReason
from kv_transfer.settings import TransferSettings
from kv_transfer.sockets import control_dealer
from wire.services import PromptEngineAddress

_MONITORED = (
    zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class SinkLink:
    """The control socket to one prompt engine process, with the monitor that notices its death."""

    def __init__(
        self,
        address: PromptEngineAddress,
        context: "zmq.Context[zmq.Socket[bytes]]",
        poller: zmq.Poller,
        settings: TransferSettings,
        now_s: float,
    ) -> None:
        self.address = address
        self._poller = poller
        self._settings = settings
        self._since_s = now_s
        self._connected = False
        self._data: zmq.Socket[bytes] | None = None
        self.socket = control_dealer(context, settings)
        self._monitor = self.socket.get_monitor_socket(_MONITORED)
        for socket in (self.socket, self._monitor):
            poller.register(socket, zmq.POLLIN)
        try:
            self.socket.connect(address.control_address)
        except zmq.ZMQError:
            self.close()
            raise

    def watch(self, data: "zmq.Socket[bytes] | None") -> None:
        """Also wake for the transport's own socket."""
        if data is not self._data:
            if self._data is not None:
                self._poller.unregister(self._data)
            if data is not None:
                self._poller.register(data, zmq.POLLIN)
            self._data = data

    def trouble(self, now_s: float) -> tuple[FailReason, str] | None:
        """Why the peer counts as lost, if it does."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_CONNECTED:
                self._connected = True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                return "connect_failed", "it does not let this host connect (its --control-allow)"
            elif event == zmq.EVENT_DISCONNECTED:
                return "peer_lost", "the connection is gone"
            elif not self._connected and now_s - self._since_s >= self._settings.refused_timeout_s:
                return "connect_failed", "nobody listens there"
        return None

    def close(self) -> None:
        self.watch(None)
        self._poller.unregister(self.socket)
        self._poller.unregister(self._monitor)
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close()
