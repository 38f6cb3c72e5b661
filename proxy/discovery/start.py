"""The kind of discovery that the settings ask for, feeding the directory of engines."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeVar

from proxy.discovery.cluster import ClusterSlices, in_cluster_api, own_namespace
from proxy.discovery.endpoints import Endpoint
from proxy.discovery.errors import ClusterRefused
from proxy.discovery.names import NameWatcher, Place
from proxy.discovery.watcher import Reports, SliceSource, SliceWatcher
from proxy.settings import ProxySettings
from wire.services import EngineRole

SourceFor = Callable[[str], SliceSource]
"""A label selector → the slices that have those labels."""
OnFailure = Callable[[EngineRole, ClusterRefused], None]
ValueT = TypeVar("ValueT")


class Discovery(Protocol):
    async def run(self) -> None:
        """Keep the directory informed until cancelled."""
        ...


def discovery(settings: ProxySettings, place: Place, on_failure: OnFailure) -> Discovery:
    """`DiscoverySetupError` where the settings' kind cannot work here."""
    if settings.discovery == "kubernetes":
        namespace = settings.discovery_namespace or own_namespace()
        in_cluster_api()  # fails here rather than on a thread

        def source(selector: str) -> SliceSource:
            return ClusterSlices(in_cluster_api(), namespace, selector)

        return ClusterWatchers(settings, place, on_failure, source)
    if settings.discovery == "dns":
        return NameWatcher(settings.engine_urls, place, refresh_s=settings.dns_refresh_s)
    return FixedEngines(settings, place)


class FixedEngines:
    """Those of the flags; they are known from the start and never change."""

    def __init__(self, settings: ProxySettings, place: Place) -> None:
        for role, urls in settings.engine_urls.items():
            place(role, [Endpoint(role, url) for url in urls])

    async def run(self) -> None:
        await asyncio.Event().wait()


class ClusterWatchers:
    """A watcher, with its thread, for every role that has a selector."""

    def __init__(
        self, settings: ProxySettings, place: Place, on_failure: OnFailure, source: SourceFor
    ) -> None:
        self._selectors = settings.selectors
        self._relist_s = settings.discovery_relist_s
        self._place = place
        self._on_failure = on_failure
        self._source = source

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        with self._watching(loop):
            await loop.create_future()

    @contextmanager
    def _watching(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        watchers = [self._watcher(loop, role, selector) for role, selector in self._selectors.items()]
        for watcher in watchers:
            watcher.start()
        try:
            yield
        finally:
            for watcher in watchers:
                watcher.stop()
            for watcher in watchers:
                watcher.join()

    def _watcher(self, loop: asyncio.AbstractEventLoop, role: EngineRole, selector: str) -> SliceWatcher:
        reports = Reports(
            found=partial(_post, loop, self._place, role),
            failed=partial(_post, loop, self._on_failure, role),
        )
        return SliceWatcher(role, self._source(selector), reports, relist_s=self._relist_s)


def _post(
    loop: asyncio.AbstractEventLoop,
    report: Callable[[EngineRole, ValueT], None],
    role: EngineRole,
    value: ValueT,
) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed, and with it whoever wanted to know
        loop.call_soon_threadsafe(report, role, value)
