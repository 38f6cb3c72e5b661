"""Follows the EndpointSlices of one role on a thread of its own, because the cluster's client blocks.

1. list    everything there is now; whatever an earlier watch missed is right again
2. watch   changes from there on, until the time to list again, or until something breaks
3. pause   only where the watch was short or broke: 0.2 s, doubling to 5 s; then 1. again

What was found last stays valid while the cluster's API cannot be asked.
"""

import logging
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from proxy.discovery.endpoints import Endpoint
from proxy.discovery.errors import ClusterRefused
from proxy.discovery.slices import Changed, Deleted, Listed, SliceView
from wire.services import EngineRole

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 5.0
SOUND_WATCH_S = 1.0
"""A round that lasted so long was no failure, whatever ended it."""
JOIN_S = 0.5

Found = Callable[[tuple[Endpoint, ...]], None]


class SliceSource(Protocol):
    """A cluster's API, asked for the slices of one role; both raise `ClusterRefused`."""

    def list(self) -> Listed: ...

    def watch(self, resource_version: str, timeout_s: float) -> Iterator[Changed | Deleted]:
        """Changes since then; ends after about `timeout_s`, and soon after `close`."""
        ...

    def close(self) -> None:
        """May be called from any thread, at any time, more than once."""
        ...


@dataclass(frozen=True, slots=True)
class Reports:
    """Who is told; called on the watching thread."""

    found: Found
    failed: Callable[[ClusterRefused], None] = lambda error: None


class SliceWatcher:
    """Owns the thread and the source; `stop` ends both."""

    def __init__(self, role: EngineRole, source: SliceSource, reports: Reports, *, relist_s: float) -> None:
        self._role = role
        self._source = source
        self._reports = reports
        self._relist_s = relist_s
        self._stopping = threading.Event()
        self._last: tuple[Endpoint, ...] | None = None
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name=f"discover-{role}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Nothing is reported any more, and the thread is about to end."""
        self._stopping.set()
        self._source.close()

    def join(self) -> None:
        """After `stop`. The thread is daemonic: one that connects right now does not hold the process."""
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        num_failures = 0
        while not self._stopping.is_set():
            started_s = monotonic()
            try:
                self._follow()
            except ClusterRefused as error:
                self._note(error)
            except Exception as error:  # without this thread nobody would ever hear of a change again
                logger.debug("the cluster's client failed", exc_info=error)
                self._note(ClusterRefused("unexpected", f"{type(error).__name__}: {error}"))
            num_failures = 0 if monotonic() - started_s > SOUND_WATCH_S else num_failures + 1
            self._stopping.wait(pause_s(num_failures, random.random()))

    def _follow(self) -> None:
        """One list and the watch after it."""
        view = SliceView().after(listed := self._source.list())
        self._tell(view)
        if self._problem:
            logger.info("%s engines are being followed again", self._role)
            self._problem = ""
        for event in self._source.watch(listed.resource_version, self._relist_s):
            view = view.after(event)
            self._tell(view)
            if self._stopping.is_set():
                return

    def _tell(self, view: SliceView) -> None:
        endpoints = view.endpoints(self._role)
        if endpoints != self._last and not self._stopping.is_set():
            self._last = endpoints
            self._reports.found(endpoints)

    def _note(self, error: ClusterRefused) -> None:
        if self._stopping.is_set():
            return
        self._reports.failed(error)
        if error.reason not in (self._problem, "expired"):
            logger.warning("cannot follow the %s engines, those known stay: %s", self._role, error)
            self._problem = error.reason


def pause_s(num_failures: int, chance: float) -> float:
    """Before the next try; `chance` in [0, 1) spreads proxies that failed together."""
    if num_failures == 0:
        return 0.0
    longest_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(num_failures - 1, 16))
    return longest_s * (0.5 + chance / 2)
