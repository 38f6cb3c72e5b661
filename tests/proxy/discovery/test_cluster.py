"""A proxy's discovery with the official client, against an API server that fails in every way it can."""

import contextlib
from collections.abc import AsyncIterator

from tests.proxy.discovery.discovered import SELECTOR, Discovered, discovering_at
from tests.proxy.discovery.fake_cluster import CUT, END, FakeCluster, slice_json


@contextlib.asynccontextmanager
async def discovering(cluster: FakeCluster) -> AsyncIterator[Discovered]:
    with cluster:
        async with discovering_at(cluster.url) as discovered:
            yield discovered


async def test_engines_come_and_go_with_their_slices() -> None:
    cluster = FakeCluster([slice_json("a", 1)])
    async with discovering(cluster) as discovered:
        await discovered.until_pods("pod-1")
        cluster.tell("ADDED", slice_json("b", 2))
        await discovered.until_pods("pod-1", "pod-2")
        cluster.tell("BOOKMARK", {"metadata": {"resourceVersion": "5"}})
        cluster.tell("MODIFIED", slice_json("b", 2, ready=False, terminating=True))
        await discovered.until_pods("pod-1")
        cluster.tell("DELETED", slice_json("a", 1))
        await discovered.until_pods()
    assert cluster.queries[0]["labelSelector"] == SELECTOR
    assert "resourceVersion" not in cluster.queries[0]
    assert cluster.queries[1]["resourceVersion"] == "1"
    assert discovered.failures == []


async def test_a_410_in_the_stream_is_followed_by_a_list_from_nowhere() -> None:
    cluster = FakeCluster([slice_json("a", 1)])
    async with discovering(cluster) as discovered:
        await discovered.until_pods("pod-1")
        cluster.items, cluster.resource_version = [slice_json("a", 2)], 70
        cluster.tell("ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"})
        await discovered.until_pods("pod-2")
        await discovered.until(lambda: len(cluster.queries) == 4)
    assert "resourceVersion" not in cluster.queries[2]
    assert cluster.queries[3]["resourceVersion"] == "70"
    assert discovered.failures == ["expired"]


async def test_a_410_to_the_watch_itself_does_the_same() -> None:
    cluster = FakeCluster([slice_json("a", 1)])
    async with discovering(cluster) as discovered:
        await discovered.until_pods("pod-1")
        cluster.items, cluster.refusals = [slice_json("a", 2)], []
        cluster.events.put(END)
        await discovered.until_pods("pod-2")
        cluster.items = [slice_json("a", 3)]
        cluster.events.put(END)
        cluster.refusals = [410]
        await discovered.until_pods("pod-3")
    assert discovered.failures in (["expired"], [])


async def test_a_gateway_timeout_and_a_refusal_leave_what_is_known() -> None:
    cluster = FakeCluster([slice_json("a", 1)])
    async with discovering(cluster) as discovered:
        await discovered.until_pods("pod-1")
        cluster.items, cluster.refusals = [slice_json("a", 2)], [504, 403, 500]
        cluster.events.put(END)
        await discovered.until_pods("pod-2")
    assert discovered.reports == [["pod-1"], ["pod-2"]]
    assert discovered.failures == ["http_504", "forbidden", "http_500"]


async def test_a_deletion_that_a_cut_watch_missed_is_found_by_the_next_list() -> None:
    cluster = FakeCluster([slice_json("a", 1), slice_json("b", 2)])
    async with discovering(cluster) as discovered:
        await discovered.until_pods("pod-1", "pod-2")
        cluster.items = [slice_json("b", 2)]  # and no event says so
        cluster.events.put(CUT)
        await discovered.until_pods("pod-2")
    assert discovered.failures == ["cut"]


async def test_nonsense_in_the_stream_is_one_more_reason_to_ask_again() -> None:
    cluster = FakeCluster([slice_json("a", 1)])
    async with discovering(cluster) as discovered:
        await discovered.until_pods("pod-1")
        cluster.items = [slice_json("a", 2)]
        cluster.events.put({"type": "ADDED", "object": {"metadata": {}}})
        await discovered.until_pods("pod-2")
    assert discovered.failures == ["nonsense"]


async def test_an_api_that_cannot_be_reached_is_tried_again() -> None:
    cluster = FakeCluster([slice_json("a", 1)])
    async with discovering(cluster) as discovered:
        await discovered.until_pods("pod-1")
        cluster._server.socket.close()  # new connections are refused, the watch goes on
        cluster.events.put(CUT)
        await discovered.until(lambda: "unreachable" in discovered.failures)
        assert discovered.pods == ["pod-1"]
