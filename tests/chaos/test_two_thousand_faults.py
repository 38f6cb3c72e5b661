"""Two thousand faults between real processes on two hosts; whoever outlives them has grown by nothing.

In the first thousand the prompt engine's end dies again and again, in the second the completion engine's.
Every hand-over ends, with the right bytes or a failure.
"""

import os
import random
import time
from collections import Counter

import psutil
import pytest

from tests.kv_transfer.namespaces import ADDRESSES, TwoHosts, needs_namespaces
from tests.kv_transfer.processes import Peer

pytestmark = [pytest.mark.chaos, needs_namespaces]

NUM_FAULTS = int(os.environ.get("TANDEM_NUM_FAULTS", "1000"))
NUM_BEFORE = NUM_FAULTS // 10
"""Faults after which memory and descriptors are noted."""
NUM_BLOCKS, BLOCK_BYTES = 65, 16384
IDS = list(range(1, NUM_BLOCKS))
LEASE_S = 0.3
MAX_STOP_S = 0.5
RATE = "80mbit"
"""All blocks take 0.1 s."""
ADDRESS = f"tcp://{ADDRESSES[0]}:7101"
END_LIMIT_S = 12.0
GROWTH_LIMIT_BYTES = 8 << 20


class Torment:
    """A source and a sink, and what is done to them."""

    def __init__(self, hosts: TwoHosts, mortal: str) -> None:
        self._hosts = hosts
        self._chance = random.Random(mortal)
        self._mortal = mortal
        self._epoch = 0
        self.outcomes: Counter[str] = Counter()
        self._last = ""
        self.source = self._start_source()
        self.sink = self._start_sink()

    @property
    def survivor(self) -> Peer:
        return self.sink if self._mortal == "source" else self.source

    def close(self) -> None:
        for peer in (self.source, self.sink):
            peer.__exit__()

    def once(self, number: int) -> None:
        """One hand-over with one fault at a random moment of it."""
        handover_id = f"h-{number}"
        fault = self._chance.choice(FAULTS)
        stage = self._chance.choice(("asked", "offered", "pulling"))
        ids = IDS[: self._chance.choice((2, 40, 64))]
        self.sink.tell("clear")
        self.sink.tell("request", handover_id, "prompt-0", self._epoch, ADDRESS)
        if stage == "asked":
            fault(self, handover_id)
        self.source.tell("offer", handover_id, 4 * len(ids), ids)
        event = self._next(handover_id)
        if event == "Offered":
            if stage == "offered":
                fault(self, handover_id)
            self.sink.tell("pull", handover_id, ids)
            if stage == "pulling":
                time.sleep(self._chance.random() * 0.1)
                fault(self, handover_id)
            event = self._next(handover_id)
        if event == "Arrived":
            self.sink.tell("holds", ids, ids)
            assert self._expect_holds()
        self.outcomes[event] += 1
        self.source.catch_up()  # nobody reads what it says, and a pipe is not endless

    def _next(self, handover_id: str) -> str:
        """The sink's next word on it; "sink died" where a new one knows nothing of it."""
        until_s = time.monotonic() + END_LIMIT_S
        if self._last == handover_id:
            return "sink died"
        while (line := self.sink.next_line(max(0.0, until_s - time.monotonic()))) is not None:
            if line[1:2] == [handover_id]:
                return str(line[0])
        raise AssertionError(f"nothing on {handover_id} within {END_LIMIT_S:g} s")

    def _expect_holds(self) -> bool:
        while (line := self.sink.next_line(END_LIMIT_S)) is not None:
            if line[0] == "holds":
                return bool(line[1])
        raise AssertionError("the sink does not say what it holds")

    def until_it_works(self) -> None:
        """A hand-over without a fault arrives."""
        for attempt in range(200):
            handover_id = f"again-{time.monotonic_ns()}-{attempt}"
            self.sink.tell("clear")
            self.sink.tell("request", handover_id, "prompt-0", self._epoch, ADDRESS)
            self.source.tell("offer", handover_id, 8, IDS[:2])
            if self._next(handover_id) == "Offered":
                self.sink.tell("pull", handover_id, IDS[:2])
                if self._next(handover_id) == "Arrived":
                    self.sink.tell("holds", IDS[:2], IDS[:2])
                    assert self._expect_holds()
                    return
            time.sleep(0.05)
        raise AssertionError("no hand-over arrives any more")

    def size(self) -> tuple[int, int]:
        """Resident bytes and descriptors of the process that is never killed."""
        process = psutil.Process(self.survivor.pid)
        return process.memory_info().rss, process.num_fds()

    # Faults

    def kill(self, handover_id: str) -> None:
        if self._mortal == "source":
            self.source.__exit__()
            self.source = self._start_source()
        else:
            self.sink.__exit__()
            self.sink = self._start_sink()
            self._last = handover_id

    def stop_source(self, handover_id: str) -> None:
        self._stop(self.source)

    def stop_sink(self, handover_id: str) -> None:
        self._stop(self.sink)

    def _stop(self, peer: Peer) -> None:
        peer.stop()
        time.sleep(self._chance.random() * MAX_STOP_S)
        peer.resume()

    def cut(self, handover_id: str) -> None:
        self._hosts.cut()
        time.sleep(self._chance.random() * MAX_STOP_S)
        self._hosts.join()

    def abandon(self, handover_id: str) -> None:
        self.sink.tell("abandon", handover_id)

    def decline(self, handover_id: str) -> None:
        self.sink.tell("decline", handover_id)

    def withdraw(self, handover_id: str) -> None:
        self.source.tell("withdraw", handover_id)

    def _start_source(self) -> Peer:
        self._epoch += 1
        return self._start("source", self._hosts.hosts[0], ADDRESS, self._epoch)

    def _start_sink(self) -> Peer:
        return self._start("sink", self._hosts.hosts[1], "", 9)

    def _start(self, mode: str, host: tuple[str, ...], address: str, epoch: int) -> Peer:
        return Peer(
            mode,
            "zmq",
            address=address,
            epoch=epoch,
            lease_s=LEASE_S,
            num_blocks=NUM_BLOCKS,
            block_bytes=BLOCK_BYTES,
            verify_kv=True,
            is_quick=True,
            within=host,
        )


FAULTS = (
    Torment.kill,
    Torment.stop_source,
    Torment.stop_sink,
    Torment.cut,
    Torment.cut,
    Torment.abandon,
    Torment.abandon,
    Torment.decline,
    Torment.withdraw,
    Torment.withdraw,
)
"""Some more often than others: a death costs the start of a process."""


@pytest.mark.parametrize("mortal", ["source", "sink"])
def test_a_thousand_faults_leave_no_wrong_byte_and_memory_and_descriptors_flat(mortal: str) -> None:
    with TwoHosts(RATE) as hosts:
        torment = Torment(hosts, mortal)
        try:
            torment.until_it_works()
            before = torment.size()
            for number in range(NUM_FAULTS):
                torment.once(number)
                if number == NUM_BEFORE:
                    torment.until_it_works()
                    before = torment.size()
            torment.until_it_works()
            after = torment.size()
        finally:
            torment.close()
    grown = after[0] - before[0]
    print(f"{NUM_FAULTS} faults, {mortal} dies: {dict(torment.outcomes)}")
    print(f"the other has {grown >> 10} KiB and {after[1] - before[1]} descriptors more")
    assert torment.outcomes["Arrived"] > NUM_FAULTS / 10
    assert grown < GROWTH_LIMIT_BYTES
    assert after[1] <= before[1] + 2
