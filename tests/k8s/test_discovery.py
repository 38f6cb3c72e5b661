"""A proxy's discovery against the API stub, whose watches lose, cut and forget things."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.k8s.api_stub import ApiStub
from tests.proxy.discovery.discovered import Discovered, discovering_at
from tests.proxy.discovery.fake_cluster import slice_json

pytestmark = pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
SLICES = "/apis/discovery.k8s.io/v1/namespaces/demo/endpointslices"


class Slices:
    """The stub's EndpointSlices of prompt engines."""

    def __init__(self, api: ApiStub, http: httpx.Client) -> None:
        self.api = api
        self._http = http
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "demo"}}
        self._http.post("/api/v1/namespaces", json=namespace)

    def put(self, name: str, number: int) -> None:
        self._http.post(SLICES, json=self._body(name, number)).raise_for_status()

    def terminate(self, name: str, number: int) -> None:
        body = self._body(name, number, ready=False, terminating=True)
        patch = {"endpoints": body["endpoints"]}
        headers = {"content-type": "application/merge-patch+json"}
        self._http.patch(f"{SLICES}/{name}", json=patch, headers=headers).raise_for_status()

    def delete(self, name: str) -> None:
        self._http.delete(f"{SLICES}/{name}").raise_for_status()

    def _body(self, name: str, number: int, **conditions: bool) -> dict[str, object]:
        body = slice_json(name, number, **conditions)
        body["metadata"]["labels"] = {"kubernetes.io/service-name": "my-prompt"}
        return {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4", **body}


@contextlib.asynccontextmanager
async def discovering(*, relist_s: float = 30.0) -> AsyncIterator[tuple[Slices, Discovered]]:
    """Two engines, which the proxy has found and watches."""
    with ApiStub() as api, httpx.Client(base_url=api.url, verify=False, timeout=5.0) as http:
        slices = Slices(api, http)
        slices.put("a", 1)
        slices.put("b", 2)
        async with discovering_at(api.url, relist_s=relist_s) as discovered:
            await discovered.until_pods("pod-1", "pod-2")
            await asyncio.to_thread(api.wait_for_watches, "endpointslices", 1)
            yield slices, discovered


async def test_a_terminating_endpoint_is_out_at_once_and_a_new_one_in() -> None:
    async with discovering() as (slices, discovered):
        slices.terminate("a", 1)
        await discovered.until_pods("pod-2")
        slices.put("c", 3)
        await discovered.until_pods("pod-2", "pod-3")


async def test_a_deletion_that_no_watch_tells_of_is_found_by_the_next_list() -> None:
    async with discovering(relist_s=1.0) as (slices, discovered):
        slices.api.faults.lose("endpointslices", "DELETED")
        slices.delete("a")
        await discovered.until_pods("pod-2")
        assert discovered.failures == []


async def test_a_watch_that_says_nothing_hides_nothing_for_long() -> None:
    async with discovering(relist_s=1.0) as (slices, discovered):
        slices.api.faults.silence("endpointslices", True)
        slices.delete("b")
        await discovered.until_pods("pod-1")


@pytest.mark.parametrize("how", ["abruptly", "in_event", "cleanly"])
async def test_a_cut_watch_is_followed_by_a_list(how: str) -> None:
    async with discovering() as (slices, discovered):
        slices.api.faults.lose("endpointslices", "DELETED")
        slices.delete("a")
        slices.api.faults.cut_watches("endpointslices", how=how)  # type: ignore[arg-type]
        await discovered.until_pods("pod-2")


async def test_a_forgotten_history_is_listed_anew() -> None:
    async with discovering() as (slices, discovered):
        slices.api.faults.lose("endpointslices", "DELETED")
        slices.delete("a")
        slices.api.faults.forget_history()
        slices.api.faults.cut_watches("endpointslices")
        await discovered.until_pods("pod-2")


@pytest.mark.parametrize("code", [403, 504, 410])
async def test_refusals_leave_what_is_known(code: int) -> None:
    async with discovering() as (slices, discovered):
        slices.api.faults.fail("list", "endpointslices", code)
        slices.api.faults.fail("watch", "endpointslices", code)
        slices.delete("a")
        await discovered.until_pods("pod-2")
        slices.api.faults.cut_watches("endpointslices")
        await discovered.until(lambda: len(discovered.failures) >= 3)
        slices.put("c", 3)
        await discovered.until_pods("pod-2", "pod-3")
        assert discovered.reports == [["pod-1", "pod-2"], ["pod-2"], ["pod-2", "pod-3"]]


async def test_an_api_server_that_comes_back_is_found_again() -> None:
    async with discovering() as (slices, discovered):
        slices.api.stop()
        await discovered.until(lambda: "unreachable" in discovered.failures)
        assert discovered.pods == ["pod-1", "pod-2"]
        slices.api.start()
        slices.put("c", 3)
        await discovered.until_pods("pod-1", "pod-2", "pod-3")
