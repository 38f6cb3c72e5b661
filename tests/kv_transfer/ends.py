"""Both ends of a hand-over with their threads and sockets, as tests hold them."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from kv_transfer.events import Arrived, Failed, Offered, SinkEvent, SourceEvent
from kv_transfer.layout import Identity
from kv_transfer.pump import Clock
from kv_transfer.settings import TransferSettings
from kv_transfer.sink import HandoverSink
from kv_transfer.source import HandoverSource
from kv_transfer.transports import make_transport
from tests.kv_transfer.builders import FIRST, Pool, identity
from tests.kv_transfer.processes import TIMEOUT_S, Peer
from wire.services import PromptEngineAddress

_T = TypeVar("_T")

LOSS_LIMIT_S = 8.0
"""The longest a request may hang on a dead prompt engine: less than a lease, which would end it too."""


class Inbox(Generic[_T]):
    """The events of one end, one at a time."""

    def __init__(self) -> None:
        self._woken = threading.Event()
        self._found: deque[_T] = deque()

    def wake(self) -> None:
        self._woken.set()

    def next(self, events: Callable[[], list[_T]], timeout_s: float) -> _T:
        until_s = time.monotonic() + timeout_s
        while not self._found:
            self._woken.clear()
            self._found.extend(events())
            if not self._found:
                assert time.monotonic() < until_s, f"no event within {timeout_s} s"
                self._woken.wait(max(0.0, until_s - time.monotonic()))
        return self._found.popleft()


class SourceEnd:
    def __init__(
        self,
        transport: str,
        address: str,
        settings: TransferSettings | None = None,
        pool: Pool | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._inbox: Inbox[SourceEvent] = Inbox()
        self.pool = (pool or Pool()).fill()
        self.source = HandoverSource(
            identity(),
            self.pool.regions,
            make_transport(transport),
            address,
            settings or TransferSettings(),
            self._inbox.wake,
            clock=clock,
        )

    def event(self) -> SourceEvent:
        return self._inbox.next(self.source.events, TIMEOUT_S)


class SinkEnd:
    def __init__(
        self,
        transport: str,
        settings: TransferSettings,
        pool: Pool,
        own_identity: Identity,
        clock: Clock,
    ) -> None:
        self._inbox: Inbox[SinkEvent] = Inbox()
        self.pool = pool
        self.transport = make_transport(transport)
        self.sink = HandoverSink(
            own_identity, pool.regions, self.transport, settings, self._inbox.wake, clock=clock
        )

    def event(self, timeout_s: float = TIMEOUT_S) -> SinkEvent:
        return self._inbox.next(self.sink.events, timeout_s)

    def failure(self, timeout_s: float = TIMEOUT_S) -> Failed:
        event = self.event(timeout_s)
        assert isinstance(event, Failed), event
        return event


@contextmanager
def a_source(
    transport: str = "fake",
    address: str = "tcp://127.0.0.1:0",
    settings: TransferSettings | None = None,
    pool: Pool | None = None,
    clock: Clock = time.monotonic,
) -> Iterator[SourceEnd]:
    end = SourceEnd(transport, address, settings, pool, clock)
    yield end
    end.source.close()
    assert end.source.stats().internal_errors == 0


@contextmanager
def a_sink(
    transport: str = "fake",
    settings: TransferSettings | None = None,
    pool: Pool | None = None,
    own_identity: Identity | None = None,
    clock: Clock = time.monotonic,
) -> Iterator[SinkEnd]:
    end = SinkEnd(
        transport,
        settings or TransferSettings(),
        pool or Pool(),
        own_identity or identity("completion-0", 9),
        clock,
    )
    yield end
    end.sink.close()
    assert end.sink.stats().internal_errors == 0


def address_of(control_address: str, epoch: int = 1) -> PromptEngineAddress:
    return PromptEngineAddress(engine_id="prompt-0", epoch=epoch, control_address=control_address)


def hand_over(peer: Peer, sink: SinkEnd, epoch: int = 1, handover_id: str = "h") -> None:
    """One whole hand-over from the peer process."""
    sink.pool.kv[:] = 0
    sink.sink.request(handover_id, address_of(peer.ready[0], epoch))
    peer.tell("offer", handover_id, 6, [3, 5])
    assert sink.event() == Offered(handover_id, 6, 2)
    sink.sink.pull(handover_id, [7, 8])
    assert sink.event() == Arrived(handover_id, FIRST)
    assert peer.expect("Released") == [handover_id, "released"]
    assert sink.pool.holds((7, 8), (3, 5))
