"""Tells the service once a second that the engine process lives, however long its step takes."""

import threading

import zmq

from engine.ipc import Pulse, encode
from engine.wake import WakePipe

PULSE_S = 1.0


class PulseThread:
    """Sends `Pulse` events on a socket of its own until `close`."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", event_endpoint: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(event_endpoint)
        self._stop = WakePipe()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.wake()
        self._thread.join()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._stop.read_fd, zmq.POLLIN)
        with self._socket:
            while not poller.poll(int(PULSE_S * 1000)):
                self._socket.send(encode(Pulse()))
