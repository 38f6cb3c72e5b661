"""How a group forms.

1. rank 0 listens at the group's address, on a store made for this one formation
2. every rank takes its place; a place is taken once, so that nobody slips into a group that already steps
3. every rank publishes its configuration and where its bell is
4. all compare all configurations; a difference ends every rank with an error that names it
5. all connect, and from then on nobody looks at the store again

A rank that loses the store before 5 starts over; one that fails later ends its process and comes back as
another engine. A rank waits for the others for as long as it takes.
"""

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import msgspec
from torch.distributed import (  # type: ignore[attr-defined]  # public, but the stubs do not say so
    DistError,
    PrefixStore,
    TCPStore,
)

from engine.collective import Collective
from engine.errors import EngineStartError
from engine.group import ROW_WIDTH, EngineGroup
from engine.group_bell import GroupBell
from shared_scheduler import GroupError

logger = logging.getLogger(__name__)

BIND_RETRY_S = 5.0
"""How long rank 0 waits for its predecessor to let go of the port."""
POLL_S = 0.05
RETRY_S = 0.3
STORE_TIMEOUT = timedelta(seconds=5)
READ_WAIT_S = 15.0
"""How long rank 0 keeps the store up after a mismatch, so that the others can read what differs."""

ReportProgress = Callable[[str, float], None]
FRACTION = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """Which rank an engine is, and where the ranks meet."""

    rank: int
    size: int
    host: str
    port: int
    step_timeout_s: float = 300.0

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


class Member(msgspec.Struct, frozen=True):
    """What a rank tells the others before they connect."""

    options: dict[str, str]
    bell_address: str


def join_group(
    place: GroupPlace,
    options: Mapping[str, str],
    *,
    wake: Callable[[], None],
    report: ReportProgress,
) -> EngineGroup:
    """Meet the other ranks. `options` must be equal on all of them; `wake` ends this rank's sleep.

    `EngineStartError` on a difference, or where rank 0 cannot listen; `GroupError` if a rank is lost.
    """
    while True:
        store, own_host = host_store(place) if place.rank == 0 else find_store(place, report)
        bell = GroupBell(place.rank, own_host, wake)
        try:
            if place.rank > 0:
                take_place(store, place, report)
            members = exchange_members(store, place, Member(dict(options), bell.address), report)
            compare(store, place, members)
        except DistError:
            bell.close()
            logger.warning("rank 0 at %s went away while the group formed", place.address)
            continue
        except BaseException:
            bell.close()
            raise
        return connect(store, place, own_host, bell, members)


def host_store(place: GroupPlace) -> tuple[TCPStore, str]:
    """Rank 0's store, bound to the group's address and to no other."""
    listener = _listen(place)
    own_host = str(listener.getsockname()[0])
    store = TCPStore(
        own_host,
        place.port,
        is_master=True,
        timeout=STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, own_host


def find_store(place: GroupPlace, report: ReportProgress) -> tuple[TCPStore, str]:
    """Rank 0's store as another rank reaches it, and the address it does so from."""
    report(f"waiting for rank 0 at {place.address}", FRACTION)
    while True:
        try:
            # Ask quietly first: a store that cannot connect writes pages of native stack frames.
            with socket.create_connection((place.host, place.port), timeout=1.0) as probe:
                own_host = str(probe.getsockname()[0])
            store = TCPStore(
                place.host, place.port, is_master=False, timeout=STORE_TIMEOUT, wait_for_workers=False
            )
            return store, own_host
        except (OSError, DistError):
            time.sleep(RETRY_S)


def take_place(store: TCPStore, place: GroupPlace, report: ReportProgress) -> None:
    """Returns once this rank's place is its own; a group that already stepped takes nobody in."""
    if store.add(f"place/{place.rank}", 1) == 1:
        return
    report(f"rank {place.rank} of the group at {place.address} is taken; waiting for it to end", FRACTION)
    logger.warning("rank %d of the group at %s is taken", place.rank, place.address)
    while True:  # ends with the store: rank 0 goes when its group goes
        time.sleep(RETRY_S)
        store.check(["place"])


def exchange_members(store: TCPStore, place: GroupPlace, own: Member, report: ReportProgress) -> list[Member]:
    """What every rank has published, in order of rank."""
    keys = [f"member/{rank}" for rank in range(place.size)]
    store.set(keys[place.rank], msgspec.json.encode(own).decode())
    reported: list[int] | None = None
    while True:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if not missing:
            return [msgspec.json.decode(store.get(key), type=Member) for key in keys]
        if missing != reported:
            reported = missing
            names = ", ".join(f"rank {rank}" for rank in missing)
            report(f"waiting for {names} of {place.size} at {place.address}", FRACTION)
        time.sleep(POLL_S)


def compare(store: TCPStore, place: GroupPlace, members: Sequence[Member]) -> None:
    """`EngineStartError` naming the first option that differs, on every rank."""
    message = difference([member.options for member in members])
    if message is None:
        return
    num_readers = store.add("readers", 1)
    deadline_s = time.monotonic() + READ_WAIT_S
    while place.rank == 0 and num_readers < place.size and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        num_readers = store.add("readers", 0)
    raise EngineStartError(message)


def difference(options_of: Sequence[Mapping[str, str]]) -> str | None:
    """The first option on which ranks differ, with the values."""
    for name in options_of[0]:
        values = [options.get(name, "nothing") for options in options_of]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            return (
                f"ranks of one group differ in {name}: {values[0]} on rank 0, {values[other]} on rank "
                f"{other}; give all ranks the same"
            )
    return None


def connect(
    store: TCPStore,
    place: GroupPlace,
    own_host: str,
    bell: GroupBell,
    members: Sequence[Member],
) -> EngineGroup:
    """The last stage: from here on a failure ends the engine."""
    try:
        bell.listen({rank: m.bell_address for rank, m in enumerate(members) if rank != place.rank})
        collective = Collective.connect(
            PrefixStore("collective", store),
            place.rank,
            place.size,
            width=ROW_WIDTH,
            host=own_host,
        )
    except GroupError:
        bell.close()
        raise
    logger.info("rank %d of %d has joined the group at %s", place.rank, place.size, place.address)
    return EngineGroup(place.rank, collective, bell, step_timeout_s=place.step_timeout_s, keep=store)


def _listen(place: GroupPlace) -> socket.socket:
    deadline_s = time.monotonic() + BIND_RETRY_S
    while True:
        try:
            return socket.create_server((place.host, place.port), backlog=place.size + 8)
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise EngineStartError(
                    f"rank 0 cannot listen at --dp-address {place.address} ({error.strerror or error}): "
                    "is there another rank 0, or does --dp-address name another machine?"
                ) from error
        time.sleep(RETRY_S)
