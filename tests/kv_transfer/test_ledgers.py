"""Random lives of hand-overs: whatever is lost, late or repeated, nothing leaks and nothing wrong arrives."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_transfer.events import Arrived, Failed, Offered, Reclaimable
from tests.kv_transfer.builders import NUM_BLOCKS, Pair, Reader, offer

IDS = st.sampled_from([f"h{index}" for index in range(6)])


class HandoverLives(RuleBasedStateMachine):
    """An engine pair that obeys the event contract, over a link that stalls, repeats and loses messages."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()
        self.pair.run()
        self.pinned: dict[str, tuple[int, ...]] = {}
        self.growing: dict[str, tuple[int, ...]] = {}
        """Announced, not offered: their blocks are the prompt engine's own."""
        self.offered_once: set[str] = set()
        self.open: dict[str, str] = {}
        """Requested and without a final event: id to `asked`, `offered`, `pulled` or `unsafe`."""
        self.destinations: dict[str, tuple[int, ...]] = {}
        self.used: set[str] = set()

    @property
    def reader(self) -> Reader:
        return self.pair.reader

    @property
    def free_local(self) -> list[int]:
        taken = {block for ids in self.destinations.values() for block in ids}
        return [block for block in range(1, NUM_BLOCKS) if block not in taken]

    @property
    def free_remote(self) -> list[int]:
        taken = {block for ids in (*self.pinned.values(), *self.growing.values()) for block in ids}
        return [block for block in range(1, NUM_BLOCKS) if block not in taken]

    @rule(handover_id=IDS)
    def offer(self, handover_id: str) -> None:
        free = self.free_remote
        if handover_id in self.growing:
            self.pinned[handover_id] = self.growing.pop(handover_id)
        elif handover_id in self.offered_once or len(free) < 2:
            return
        else:
            self.pinned[handover_id] = (free[0], free[1])
        self.offered_once.add(handover_id)
        self.pair.pool.kv[list(self.pinned[handover_id])] = 1  # the prompt engine has computed them
        self.pair.offer(offer(handover_id, block_ids=self.pinned[handover_id]))
        self.drain()

    @rule(handover_id=IDS)
    def announce(self, handover_id: str) -> None:
        """The first of two blocks; once more, if it is computed again in another place."""
        free = self.free_remote
        if handover_id in self.offered_once - self.growing.keys() or len(free) < 2:
            return
        self.offered_once.add(handover_id)
        self.overwrite(self.growing.get(handover_id, ()))
        self.growing[handover_id] = (free[0], free[1])
        self.pair.pool.kv[free[0]] = 1
        self.pair.announce(free[:1], handover_id=handover_id)
        self.drain()

    @rule(handover_id=IDS)
    def withdraw(self, handover_id: str) -> None:
        self.overwrite(self.growing.pop(handover_id, ()))
        self.pair.withdraw(handover_id)
        self.drain()

    def overwrite(self, blocks: tuple[int, ...]) -> None:
        """They are someone else's now: a read of them that is confirmed later is a wrong answer."""
        self.pair.pool.kv[list(blocks)] = 255

    @precondition(lambda self: not self.reader.session.is_lost)
    @rule(handover_id=IDS)
    def request(self, handover_id: str) -> None:
        if handover_id not in self.used:
            self.used.add(handover_id)
            self.open[handover_id] = "asked"
            self.reader.request(handover_id, 20)

    @rule(handover_id=IDS)
    def pull(self, handover_id: str) -> None:
        free = self.free_local
        if self.open.get(handover_id) == "offered" and len(free) >= 2:
            self.open[handover_id] = "pulled"
            self.destinations[handover_id] = (free[0], free[1])
            self.reader.pool.kv[list(self.destinations[handover_id])] = 0
            self.reader.pull(self.destinations[handover_id], handover_id)
            self.drain()

    @rule(handover_id=IDS)
    def abandon(self, handover_id: str) -> None:
        self.reader.abandon(handover_id)
        self.drain()

    @rule(handover_id=IDS)
    def decline(self, handover_id: str) -> None:
        self.reader.decline(handover_id)
        self.drain()

    @rule()
    def deliver(self) -> None:
        self.pair.run()
        self.drain()

    @rule(seconds=st.sampled_from([0.5, 2.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.pair.advance(seconds, step_s=0.5)
        self.drain()

    @rule(held=st.booleans(), to_source=st.booleans())
    def hold(self, held: bool, to_source: bool) -> None:
        (self.reader.to_source if to_source else self.reader.to_sink).hold = held

    @rule(to_source=st.booleans())
    def lose_or_repeat(self, to_source: bool) -> None:
        wire = self.reader.to_source if to_source else self.reader.to_sink
        if wire.frames:
            wire.frames.append(wire.frames[0])
            wire.frames.rotate(1)

    @rule(stalled=st.booleans())
    def stall(self, stalled: bool) -> None:
        self.reader.transport.stalled = stalled

    def drain(self) -> None:
        for released in self.pair.take_events():
            blocks = self.pinned.pop(released.handover_id)
            if released.reason != "released":
                self.overwrite(blocks)
        for event in self.reader.take_events():
            self.on_event(event.handover_id, event)

    def on_event(self, handover_id: str, event: Offered | Arrived | Failed | Reclaimable) -> None:
        assert handover_id in self.open, f"{event} after the final event"
        if isinstance(event, Offered):
            assert self.open[handover_id] == "asked"
            self.open[handover_id] = "offered"
            return
        if isinstance(event, Failed) and not event.blocks_safe:
            self.open[handover_id] = "unsafe"
            return
        if isinstance(event, Arrived):
            assert self.open[handover_id] == "pulled"
            assert not (self.reader.pool.kv[list(self.destinations[handover_id])] == 255).any()
            assert self.reader.pool.kv[list(self.destinations[handover_id])].all()
        del self.open[handover_id]
        self.destinations.pop(handover_id, None)

    @invariant()
    def consistent(self) -> None:
        self.pair.check_invariants()

    def teardown(self) -> None:
        """Once the link is whole again everything ends: no block stays pinned, no request stays open."""
        self.reader.transport.stalled = False
        self.reader.to_source.hold = self.reader.to_sink.hold = False
        self.pair.run()
        self.drain()
        for handover_id in list(self.growing):
            self.withdraw(handover_id)
        self.pair.run()
        self.drain()
        for handover_id, state in list(self.open.items()):
            if state == "offered":
                self.reader.abandon(handover_id)
            elif state == "asked":
                self.pair.withdraw(handover_id)
        self.pair.advance(60, step_s=0.5)
        self.drain()
        assert self.open == {}
        assert self.pinned == {}
        assert self.destinations == {}


TestHandoverLives = HandoverLives.TestCase
TestHandoverLives.settings = settings(max_examples=50, stateful_step_count=40)
