"""A proxy finds its release's engines with the rights and the selector of the chart, whatever breaks."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest
from kubernetes import client

from proxy.discovery.cluster import ClusterSlices, SlicesApi
from proxy.discovery.endpoints import Endpoint
from proxy.discovery.errors import ClusterRefused
from proxy.discovery.start import ClusterWatchers
from proxy.settings import ProxySettings
from tests.k8s.api_stub import ApiStub
from tests.k8s.chart import find, render, variables
from tests.k8s.tools import Tools
from wire.services import EngineRole

ACCOUNT = "system:serviceaccount:default:rel-tandem-proxy"
SLICES = "endpointslices"


@pytest.fixture
def api() -> Iterator[ApiStub]:
    with ApiStub() as api:
        yield api


class Found:
    """Pods of prompt engines that the proxy knows, and what it was refused."""

    def __init__(self) -> None:
        self.pods: list[str] = []
        self.refused: list[str] = []

    def place(self, role: EngineRole, endpoints: tuple[Endpoint, ...]) -> None:
        if role == "prompt":
            self.pods = sorted(endpoint.instance for endpoint in endpoints)

    def failed(self, role: EngineRole, error: ClusterRefused) -> None:
        self.refused.append(error.reason)

    async def until(self, *pods: str) -> None:
        async with asyncio.timeout(20):
            while self.pods != list(pods):  # noqa: ASYNC110 - told by a thread, which sets no event
                await asyncio.sleep(0.005)

    async def until_refused(self, reason: str) -> None:
        async with asyncio.timeout(20):
            while reason not in self.refused:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@pytest.fixture
async def found(tools: Tools, api: ApiStub) -> AsyncIterator[Found]:
    """A proxy's discovery, set up by the chart's variables and held to the chart's Role."""
    manifests = render(tools, values={"proxy.settings": {"discovery_relist_s": 1}})
    for manifest in manifests:
        if manifest["kind"] in ("Role", "RoleBinding", "ServiceAccount"):
            api.put(manifest)
    given = variables(find(manifests, "Deployment", "rel-tandem-proxy"))
    names = ("discovery", "prompt_selector", "completion_selector", "discovery_relist_s")
    settings = ProxySettings.model_validate(
        {name: given[f"TANDEM_PROXY_{name.upper()}"] for name in names} | {"discovery_namespace": "default"}
    )
    found = Found()
    watchers = ClusterWatchers(settings, found.place, found.failed, lambda selector: source(api, selector))
    running = asyncio.create_task(watchers.run())
    try:
        yield found
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def source(api: ApiStub, selector: str) -> ClusterSlices:
    configuration = client.Configuration()
    configuration.host = api.url
    configuration.proxy = None
    configuration.retries = False
    configuration.api_key = {"authorization": f"Bearer {ACCOUNT}"}
    slices = cast(SlicesApi, client.DiscoveryV1Api(client.ApiClient(configuration)))
    return ClusterSlices(slices, "default", selector)


def put_slice(
    api: ApiStub, name: str, *pods: str, service: str = "rel-tandem-prompt", **conditions: bool
) -> None:
    endpoints: list[dict[str, Any]] = [
        {
            "addresses": [f"10.0.0.{ord(pod)}"],
            "targetRef": {"kind": "Pod", "name": pod, "namespace": "default", "uid": pod},
            "conditions": {"ready": True, **conditions},
        }
        for pod in pods
    ]
    api.put(
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
            "addressType": "IPv4",
            "ports": [{"name": "http", "port": 7001, "protocol": "TCP"}],
            "endpoints": endpoints,
        }
    )


async def test_engines_of_the_release_come_and_go(api: ApiStub, found: Found) -> None:
    put_slice(api, "s", "a", "b")
    put_slice(api, "other", "c", service="other-tandem-prompt")
    await found.until("a", "b")
    put_slice(api, "s", "a", "b", ready=False, terminating=True)
    await found.until()


async def test_what_a_watch_was_not_told_the_next_list_tells(api: ApiStub, found: Found) -> None:
    put_slice(api, "s", "a")
    put_slice(api, "t", "b")
    await found.until("a", "b")
    api.faults.lose(SLICES, "DELETED")
    api.delete(SLICES, "t")
    await found.until("a")
    assert found.refused == []


async def test_after_410_504_and_cut_streams_engines_are_followed_again(api: ApiStub, found: Found) -> None:
    put_slice(api, "s", "a")
    await found.until("a")
    api.faults.forget_history()
    put_slice(api, "t", "b")
    await found.until("a", "b")
    api.faults.fail("list", SLICES, 504, times=3)
    api.faults.cut_watches(SLICES, how="in_event")
    await found.until_refused("http_504")
    assert found.pods == ["a", "b"]
    put_slice(api, "u", "c")
    await found.until("a", "b", "c")


async def test_rights_that_are_taken_leave_what_is_known(api: ApiStub, found: Found) -> None:
    put_slice(api, "s", "a")
    await found.until("a")
    binding = api.get("rolebindings", "rel-tandem-proxy")
    api.delete("rolebindings", "rel-tandem-proxy")
    await found.until_refused("forbidden")
    assert found.pods == ["a"]
    api.put(
        {name: binding[name] for name in ("apiVersion", "kind", "roleRef", "subjects")}
        | {"metadata": {"name": "rel-tandem-proxy"}}
    )
    put_slice(api, "t", "b")
    await found.until("a", "b")


async def test_a_server_that_comes_back_is_asked_again(api: ApiStub, found: Found) -> None:
    put_slice(api, "s", "a")
    await found.until("a")
    api.stop()
    await found.until_refused("unreachable")
    assert found.pods == ["a"]
    api.start()
    put_slice(api, "s", "b")
    await found.until("b")
