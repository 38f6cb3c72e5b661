"""How ranks of a group hear of each other outside of collectives: beats, and the bell that ends a sleep.

Every rank publishes on a ZMQ socket of its own and listens to the others', so that a process which is not a
rank can tell nobody anything. A frame is (rank, message): a beat, a farewell, or the number of the collective
that the sender is about to enter.
"""

import logging
import struct
import threading
import time
from collections.abc import Callable, Mapping

import zmq

from engine.wake import WakePipe
from shared_scheduler import GroupError

logger = logging.getLogger(__name__)

LISTENERS_WAIT_S = 10.0
BEAT_S = 1.0
MAX_MISSED_BEATS = 5
"""Silence is counted in beats of one's own, so that a machine that was suspended suspects nobody."""
_FRAME = struct.Struct("<qq")
_BEAT, _FAREWELL = -1, -2


class GroupBell:
    """One rank's voice and ear; a thread beats and listens until `close`."""

    def __init__(self, rank: int, host: str, wake: Callable[[], None], beat_s: float = BEAT_S) -> None:
        """`host`: address that the other ranks reach; `wake`: called from the thread when somebody rings."""
        self._rank = rank
        self._wake_owner = wake
        self._beat_s = beat_s
        self._context = zmq.Context()
        self._voice = self._context.socket(zmq.XPUB)
        self._voice.setsockopt(zmq.XPUB_VERBOSE, 1)  # every listener announces itself
        self._voice.setsockopt(zmq.LINGER, 200)
        self._voice.setsockopt(zmq.IPV6, 1)
        port = self._voice.bind_to_random_port(f"tcp://{bracketed(host)}")
        self.address = f"tcp://{bracketed(host)}:{port}"
        self._speaking = threading.Lock()
        self._stop = WakePipe()
        self._thread: threading.Thread | None = None
        self._missed: dict[int, int] = {}
        self._left: set[int] = set()
        self._rung_number = -1
        self._is_closed = False

    def listen(self, addresses: Mapping[int, str]) -> None:
        """Start beating, and listening to the other ranks; `GroupError` unless all of them listen too."""
        ear = self._context.socket(zmq.SUB)
        ear.setsockopt(zmq.IPV6, 1)
        ear.setsockopt(zmq.SUBSCRIBE, b"")
        for rank, address in addresses.items():
            ear.connect(address)
            self._missed[rank] = 0
        try:
            self._await_listeners(len(addresses))
        except GroupError:
            ear.close()
            raise
        self._thread = threading.Thread(target=self._run, args=(ear,), name="group-bell", daemon=True)
        self._thread.start()

    def ring(self, number: int) -> None:
        """Call the sleeping ranks to collective `number`."""
        self._say(number)

    def has_rung(self, number: int) -> bool:
        """Has anybody called to collective `number`? Calls to past ones do not count."""
        return self._rung_number >= number

    @property
    def silent_rank(self) -> int | None:
        """A rank that has not been heard of for too long."""
        return next((rank for rank, missed in self._missed.items() if missed > MAX_MISSED_BEATS), None)

    @property
    def departed_rank(self) -> int | None:
        """A rank that said farewell."""
        return min(self._left, default=None)

    def close(self) -> None:
        """Say farewell and fall silent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._say(_FAREWELL)
        self._stop.wake()
        if self._thread is not None:
            self._thread.join()
        self._voice.close()
        self._context.term()

    def _await_listeners(self, num_listeners: int) -> None:
        deadline_s = time.monotonic() + LISTENERS_WAIT_S
        for number in range(num_listeners):
            if not self._voice.poll(max(0, int((deadline_s - time.monotonic()) * 1000))):
                raise GroupError(f"only {number} of {num_listeners} other ranks listen to {self.address}")
            self._voice.recv()

    def _say(self, message: int) -> None:
        with self._speaking:  # a ZMQ socket may change threads at a memory barrier
            self._voice.send(_FRAME.pack(self._rank, message))

    def _run(self, ear: "zmq.Socket[bytes]") -> None:
        poller = zmq.Poller()
        poller.register(ear, zmq.POLLIN)
        poller.register(self._stop.read_fd, zmq.POLLIN)
        next_beat_s = time.monotonic()
        with ear:
            while True:
                wait_s = next_beat_s - time.monotonic()
                ready = dict(poller.poll(max(0, int(wait_s * 1000))))
                if self._stop.read_fd in ready:
                    return
                if ear in ready:
                    self._hear(ear.recv())
                if time.monotonic() >= next_beat_s:
                    next_beat_s = time.monotonic() + self._beat_s
                    for rank in self._missed:
                        self._missed[rank] += 1
                    self._say(_BEAT)

    def _hear(self, frame: bytes) -> None:
        rank, message = _FRAME.unpack(frame)
        if rank not in self._missed:
            logger.warning("rank %d spoke under another rank's address; see --dp-address", rank)
            return
        self._missed[rank] = 0
        if message == _FAREWELL:
            self._left.add(rank)
            self._wake_owner()
        elif message > self._rung_number:
            self._rung_number = message
            self._wake_owner()


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
