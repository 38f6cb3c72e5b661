"""Two hosts, real processes, a link of 100 Mbit/s that is cut, and ends that stop, die and come back.

Every request ends with the right bytes or an error in time, P gets every block back, and the next one works.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.kv_transfer.namespaces import ADDRESSES, TwoHosts, needs_namespaces
from tests.kv_transfer.processes import Peer, needs_nixl

pytestmark = needs_namespaces

NUM_BLOCKS, BLOCK_BYTES = 1025, 65536
IDS = list(range(1, NUM_BLOCKS))
"""64 MiB: 5.6 s on this link, so that what befalls a read comes before its end."""
SHORT = IDS[:256]
"""16 MiB: 1.4 s on this link."""
LEASE_S = 3.0
ADDRESS = f"tcp://{ADDRESSES[0]}:7101"
END_LIMIT_S = 12.0
AGAIN_LIMIT_S = 5.0
"""From the fault's end until a small hand-over arrives."""


class Hosts(TwoHosts):
    """P on one host, D on the other."""

    def __init__(self, transport: str) -> None:
        super().__init__()
        self._transport = transport

    def start_source(self, epoch: int) -> Peer:
        return self._start("source", self.hosts[0], ADDRESS, epoch)

    def start_sink(self) -> Peer:
        return self._start("sink", self.hosts[1], "", 9)

    def _start(self, mode: str, host: tuple[str, ...], address: str, epoch: int) -> Peer:
        return Peer(
            mode,
            self._transport,
            address=address,
            epoch=epoch,
            lease_s=LEASE_S,
            num_blocks=NUM_BLOCKS,
            block_bytes=BLOCK_BYTES,
            verify_kv=True,
            within=host,
        )


@contextmanager
def both_ends(transport: str = "zmq") -> Iterator[tuple[Hosts, Peer, Peer]]:
    with Hosts(transport) as hosts, hosts.start_source(1) as source, hosts.start_sink() as sink:
        assert hand_over(source, sink, "warm", IDS[:2]) == "Arrived"
        yield hosts, source, sink


def begin(source: Peer, sink: Peer, handover_id: str, ids: list[int], epoch: int = 1) -> str | None:
    """Ask and pull; None once the read is under way, else how it failed."""
    sink.tell("clear")
    sink.tell("request", handover_id, "prompt-0", epoch, ADDRESS)
    source.tell("offer", handover_id, 4 * len(ids), ids)
    event = next_event(sink, handover_id)
    if event != "Offered":
        return event
    sink.tell("pull", handover_id, ids)
    return None


def next_event(peer: Peer, handover_id: str, timeout_s: float = END_LIMIT_S) -> str:
    """The peer's next word on this hand-over; what it says of others is dropped."""
    until_s = time.monotonic() + timeout_s
    while (line := peer.next_line(max(0.0, until_s - time.monotonic()))) is not None:
        if line[1:2] == [handover_id]:
            return str(line[0])
    raise AssertionError(f"nothing on {handover_id} within {timeout_s:g} s")


def end(sink: Peer, handover_id: str, ids: list[int]) -> str:
    """The sink's final word; the bytes are checked where it arrived."""
    event = next_event(sink, handover_id)
    if event == "Arrived":
        sink.tell("holds", ids, ids)
        assert sink.expect("holds") == [True]
    return event


def hand_over(source: Peer, sink: Peer, handover_id: str, ids: list[int], epoch: int = 1) -> str:
    return begin(source, sink, handover_id, ids, epoch) or end(sink, handover_id, ids)


def until_it_works_again(source: Peer, sink: Peer, epoch: int = 1, name: str = "again") -> float:
    """Seconds until a small hand-over arrives."""
    began_s = time.monotonic()
    for attempt in range(1000):
        if hand_over(source, sink, f"{name}-{attempt}", IDS[:2], epoch) == "Arrived":
            return time.monotonic() - began_s
        assert time.monotonic() - began_s < 4 * AGAIN_LIMIT_S
    raise AssertionError("unreachable")


@pytest.mark.parametrize("cuts_s", [(1.0, 4.0), pytest.param((30.0,), marks=pytest.mark.chaos)])
def test_link_cut_during_a_pull(cuts_s: tuple[float, ...]) -> None:
    with both_ends() as (hosts, source, sink):
        for cut_s in cuts_s:
            handover_id = f"cut-{cut_s:g}"
            ids = IDS if cut_s > LEASE_S else SHORT
            assert begin(source, sink, handover_id, ids) is None
            hosts.cut()
            until_s = time.monotonic() + cut_s
            outcome = end(sink, handover_id, ids) if cut_s > LEASE_S else None
            time.sleep(max(0.0, until_s - time.monotonic()))
            hosts.join()
            outcome = outcome or end(sink, handover_id, ids)
            assert outcome == "Failed" or cut_s < LEASE_S
            assert next_event(source, handover_id) == "Released"
            assert until_it_works_again(source, sink, name=handover_id) < AGAIN_LIMIT_S


def test_source_stopped_during_a_pull() -> None:
    with both_ends() as (_, source, sink):
        assert begin(source, sink, "h", IDS) is None
        source.stop()
        assert end(sink, "h", IDS) == "Failed"
        source.resume()
        assert next_event(source, "h") == "Released"
        assert until_it_works_again(source, sink) < AGAIN_LIMIT_S


def test_sink_stopped_for_longer_than_the_lease_during_a_pull_arrives_nowhere() -> None:
    with both_ends() as (_, source, sink):
        assert begin(source, sink, "h", IDS) is None
        sink.catch_up()
        sink.stop()
        assert next_event(source, "h", 2 * LEASE_S) == "Released"
        sink.resume()
        assert end(sink, "h", IDS) == "Failed"
        assert until_it_works_again(source, sink) < AGAIN_LIMIT_S


def test_source_killed_during_a_pull_and_started_again_at_its_address() -> None:
    with both_ends() as (hosts, source, sink):
        assert begin(source, sink, "h", IDS) is None
        source.kill()
        assert end(sink, "h", IDS) == "Failed"
        with hosts.start_source(2) as restarted:
            assert until_it_works_again(restarted, sink, epoch=2) < AGAIN_LIMIT_S


def test_sink_killed_during_a_pull_costs_one_lease_and_another_is_served() -> None:
    with both_ends() as (hosts, source, sink):
        assert begin(source, sink, "h", IDS) is None
        sink.kill()
        killed_s = time.monotonic()
        assert next_event(source, "h") == "Released"
        assert time.monotonic() - killed_s < 2 * LEASE_S
        with hosts.start_sink() as another:
            assert hand_over(source, another, "k", IDS[:2]) == "Arrived"


@needs_nixl
def test_nixl_over_tcp_reads_between_hosts_and_a_source_that_dies_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reader's death is left out: over TCP it may take the source with it (decision 020)."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with both_ends("nixl") as (hosts, source, sink):
        assert hand_over(source, sink, "whole", SHORT) == "Arrived"
        assert begin(source, sink, "h", IDS) is None
        source.kill()
        assert end(sink, "h", IDS) == "Failed"
        with hosts.start_source(2) as restarted:
            assert until_it_works_again(restarted, sink, epoch=2) < AGAIN_LIMIT_S
