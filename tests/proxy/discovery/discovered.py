"""What a proxy finds in a cluster, and what it could not ask."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import cast

from kubernetes import client

from proxy.discovery.cluster import ClusterSlices, SlicesApi
from proxy.discovery.endpoints import Endpoint
from proxy.discovery.errors import ClusterRefused
from proxy.discovery.start import ClusterWatchers
from proxy.settings import ProxySettings
from wire.services import EngineRole

SELECTOR = "kubernetes.io/service-name=my-prompt"


class Discovered:
    """What a proxy of the API at `url` knows of prompt engines."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.pods: list[str] | None = None
        self.reports: list[list[str]] = []
        self.failures: list[str] = []

    def place(self, role: EngineRole, endpoints: tuple[Endpoint, ...]) -> None:
        self.pods = [endpoint.instance for endpoint in endpoints]
        self.reports.append(self.pods)

    def failed(self, role: EngineRole, error: ClusterRefused) -> None:
        self.failures.append(error.reason)

    def source(self, selector: str) -> ClusterSlices:
        configuration = client.Configuration()
        configuration.host = self._url
        configuration.verify_ssl = False
        configuration.proxy = None
        configuration.retries = False
        api = client.DiscoveryV1Api(client.ApiClient(configuration))
        return ClusterSlices(cast(SlicesApi, api), "demo", selector)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 - the server is a thread, it sets no event
                await asyncio.sleep(0.005)

    async def until_pods(self, *pods: str) -> None:
        await self.until(lambda: self.pods == list(pods))


@contextlib.asynccontextmanager
async def discovering_at(url: str, *, relist_s: float = 30.0) -> AsyncIterator[Discovered]:
    settings = ProxySettings(
        discovery="kubernetes",
        discovery_namespace="demo",
        prompt_selector=SELECTOR,
        discovery_relist_s=relist_s,
    )
    discovered = Discovered(url)
    watchers = ClusterWatchers(settings, discovered.place, discovered.failed, discovered.source)
    task = asyncio.create_task(watchers.run())
    try:
        yield discovered
    finally:
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("discover-")]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
