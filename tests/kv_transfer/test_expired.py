"""Hand-overs that expire while they are read, and whose blocks hold something else at once.

The source is in this process, on a clock that jumps; the reader is another process, and no digests help it.
"""

import random
import time
from collections import Counter

import pytest

from kv_transfer.events import Released
from kv_transfer.settings import TransferSettings
from kv_transfer.source import HandoverSource
from kv_transfer.transports import make_transport
from tests.kv_transfer.builders import Pool, identity, offer
from tests.kv_transfer.ends import Inbox
from tests.kv_transfer.processes import TIMEOUT_S, Peer

NUM_BLOCKS, BLOCK_BYTES = 65, 65536
IDS = list(range(1, NUM_BLOCKS))
LEASE_S = 5.0
OF_ANOTHER = 0xFF
"""What whoever has the blocks next writes into them, over what was there."""


class Reused:
    """A source and its reader; every hand-over ends by the reader's release or by its lease."""

    def __init__(self, transport: str) -> None:
        self.pool = Pool(NUM_BLOCKS, BLOCK_BYTES).fill()
        self._original = self.pool.kv.copy()
        self._jumped_s = 0.0
        self._inbox: Inbox[object] = Inbox()
        self.source = HandoverSource(
            identity(),
            self.pool.regions,
            make_transport(transport),
            "tcp://127.0.0.1:0",
            TransferSettings(lease_s=LEASE_S),
            self._inbox.wake,
            clock=lambda: time.monotonic() + self._jumped_s,
        )
        self.sink = Peer("sink", transport, num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES)

    def close(self) -> None:
        self.sink.__exit__()
        self.source.close()

    def begin(self, handover_id: str) -> None:
        """The reader may begin to read."""
        self.pool.kv[:] = self._original
        self.sink.tell("clear")
        self.sink.tell("request", handover_id, "prompt-0", 1, self.source.control_address)
        self.source.offer(offer(handover_id, 4 * len(IDS), IDS))
        assert self.sink.expect("Offered") == [handover_id]
        self.sink.tell("pull", handover_id, IDS)

    def expire(self) -> None:
        """What is leased ends now, if it was not released before."""
        self._jumped_s += 2 * LEASE_S
        self.source.withdraw("nobody")  # its thread looks at the clock

    def released(self) -> str:
        """How it ended at the source, whose blocks are another's from then on."""
        event = self._inbox.next(self.source.events, TIMEOUT_S)
        assert isinstance(event, Released)
        self.pool.kv[:] ^= OF_ANOTHER
        return event.reason

    def outcome(self, handover_id: str) -> str:
        """How it ended at the reader, once none of its reads can write any more."""
        line = self.sink.next_line()
        assert line is not None
        outcome, whose, *is_safe = line
        assert whose == handover_id
        if is_safe == [False]:
            assert self.sink.expect("Reclaimable") == [handover_id]
        return str(outcome)

    def arrived_right(self) -> bool:
        self.sink.tell("holds", IDS, IDS)
        return bool(self.sink.expect("holds")[0])


@pytest.mark.parametrize("num_tries", [60, pytest.param(1000, marks=pytest.mark.chaos)])
def test_a_read_of_an_expired_handover_never_arrives_over_any_transport(
    real_transport: str, num_tries: int
) -> None:
    chance = random.Random(num_tries)
    outcomes: Counter[str] = Counter()
    reused = Reused(real_transport)
    try:
        took_s = []
        for handover_id in ("first", *(f"undisturbed-{number}" for number in range(5))):
            began_s = time.monotonic()
            reused.begin(handover_id)
            assert reused.outcome(handover_id) == "Arrived"
            assert reused.arrived_right()
            assert reused.released() == "released"
            took_s.append(time.monotonic() - began_s)
        for number in range(num_tries):
            handover_id = f"h-{number}"
            reused.begin(handover_id)
            time.sleep(0.7 * chance.random() * min(took_s))
            reused.expire()
            ending = reused.released()
            outcome = reused.outcome(handover_id)
            outcomes[f"{ending}, {outcome}"] += 1
            assert (outcome == "Arrived") == (ending == "released"), handover_id
            if outcome == "Arrived":
                assert reused.arrived_right(), handover_id
    finally:
        reused.close()
    print(f"{real_transport}: {dict(outcomes)}")
    assert outcomes["expired, Failed"] > 0
