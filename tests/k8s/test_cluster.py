"""The chart on a real control plane, with real Tandem processes as pods: what happens to users' streams.

One cluster for all tests, in the order in which they stand: each takes the release as the last one left it.
"""

import re
import shlex
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.k8s.cluster.api import ApiFailure
from tests.k8s.cluster.conditions import ClusterImpossible, cluster_programs, say_loudly
from tests.k8s.cluster.control_plane import eventually
from tests.k8s.cluster.load import READ_TIMEOUT_S, Ask, running_load, undisturbed
from tests.k8s.cluster.network import NodeNetwork
from tests.k8s.cluster.observed import all_engines, engine_urls, engines_by_address, may, scale
from tests.k8s.cluster.running import CHART, NAMESPACE, RELEASE, Cluster

pytestmark = [
    pytest.mark.system,
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default:NO KUBERNETES CONTROL PLANE"),
]

PROXY, PROMPT, COMPLETION = (f"{RELEASE}-{role}" for role in ("proxy", "prompt", "completion"))
DEMO_VALUES = CHART / "values-cpu-demo.yaml"
VALUES: dict[str, object] = {
    "proxy.preStopSeconds": 1,
    "prompt.preStopSeconds": 1,
    "completion.preStopSeconds": 1,
    "prompt.probes.readinessPeriodSeconds": 1,
    "completion.probes.readinessPeriodSeconds": 1,
    "prompt.settings.grace_s": 20,
    "completion.settings.grace_s": 8,
}
"""The demo's, with less waiting."""
AUTOSCALING = {
    "hpa": {"enabled": True},
    "minReplicas": 1,
    "maxReplicas": 3,
    "behavior": {"scaleDown": {"stabilizationWindowSeconds": 3}},
}
INSTALLED = {
    **VALUES,
    "prompt.autoscaling": AUTOSCALING,
    "completion.autoscaling": AUTOSCALING,
    "prompt.autoscaling.targets.queuedPromptTokens": 200,
    "prompt.settings.prefix_cache": False,  # the same prompts come again and again
}
"""What the autoscalers' test asks for; the first upgrade takes it away."""
ASKS = [Ask(f"{number} facts about the sea:\n1.", 64) for number in ("Ten", "Nine", "Eight")]
LONG_ASKS = [
    Ask(f"A long story about {what}. Once upon a time,", num_tokens)
    for what, num_tokens in (
        ("a ship", 200),
        ("a king", 250),
        ("a fox", 300),
        ("the rain", 350),
        ("a clock", 400),
        ("two friends", 450),
    )
]
"""They take seconds and end at different times: whenever an engine goes, some are in the middle there."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A control plane, a node and the chart with the demo's values, installed once for all tests here."""
    try:
        binaries, tools = cluster_programs()
    except ClusterImpossible as error:
        pytest.skip(say_loudly(str(error)))
    with NodeNetwork() as network, network.entered():
        cluster = Cluster(binaries, tools)
        try:
            cluster.start()
            cluster.apply_chart("install", [DEMO_VALUES], INSTALLED)
            yield cluster
        finally:
            cluster.close()


@pytest.fixture(scope="module")
def url(cluster: Cluster) -> str:
    """Of the proxy's Service."""
    return cluster.service_url(PROXY)


@pytest.fixture(scope="module")
def expected(url: str) -> dict[Ask, str]:
    """What streams say while nothing happens."""
    return undisturbed(url, ASKS)


@pytest.fixture(scope="module")
def expected_long(url: str) -> dict[Ask, str]:
    return undisturbed(url, LONG_ASKS)


def test_an_installed_release_passes_its_own_test_and_streams(cluster: Cluster, url: str) -> None:
    cluster.helm("test", RELEASE, "--timeout=120s")
    assert "completed:" in cluster.logs(f"{RELEASE}-test")
    assert (
        "Paris" in undisturbed(url, [Ask("The capital of France is", 8)])[Ask("The capital of France is", 8)]
    )
    assert engine_urls(url) == all_engines(cluster)


def test_the_line_that_the_notes_give_is_answered(cluster: Cluster, url: str) -> None:
    notes = cluster.helm("get", "notes", RELEASE)
    assert f"port-forward service/{PROXY} 8000:{url.rpartition(':')[2]}" in notes
    line = notes[notes.index("curl -N") : notes.index("One completion")]
    arguments = shlex.split(line.replace("\\\n", " "))
    address, body = arguments[2], arguments[arguments.index("-d") + 1]
    answer = httpx.post(
        address.replace("http://127.0.0.1:8000", url),
        content=body,
        headers={"content-type": "application/json"},
        timeout=READ_TIMEOUT_S,
        trust_env=False,
    )
    assert answer.status_code == 200
    assert "Paris" in answer.text
    assert answer.text.rstrip().endswith("data: [DONE]")


def test_pods_stay_within_their_memory(cluster: Cluster) -> None:
    """The demo's limits add up to less than 4 GiB, and no pod comes near its own."""
    limits = {"proxy": 640, "prompt": 1600, "completion": 1600}
    used = {role: cluster.memory_mib(role) for role in limits}
    assert sum(limits.values()) < 4096
    assert all(used[role] < limits[role] for role in limits), used


def test_the_proxy_may_look_at_endpoint_slices_of_its_namespace_and_nothing_else(cluster: Cluster) -> None:
    group = "discovery.k8s.io"
    for verb in ("get", "list", "watch"):
        assert may(cluster, PROXY, verb, "endpointslices", group)
        assert not may(cluster, PROXY, verb, "endpointslices", group, namespace="kube-system")
        for resource in ("secrets", "pods", "services", "endpoints", "configmaps"):
            assert not may(cluster, PROXY, verb, resource)
        for account in (PROMPT, COMPLETION):
            assert not may(cluster, account, verb, "endpointslices", group)
    for verb in ("create", "update", "patch", "delete", "deletecollection"):
        assert not may(cluster, PROXY, verb, "endpointslices", group)
        assert not may(cluster, PROXY, verb, "pods")


def test_the_only_completion_pod_is_not_evicted(cluster: Cluster) -> None:
    (pod,) = cluster.ready_pods("completion")
    name = pod["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": name}}
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction"

    def is_refused_by_the_budget() -> bool:
        with pytest.raises(ApiFailure) as refused:
            cluster.api.create(path, eviction)
        assert refused.value.status == 429
        return b"disruption budget" in refused.value.body

    eventually(is_refused_by_the_budget, "the eviction is refused by the disruption budget", 20.0)
    assert [each["metadata"]["name"] for each in cluster.ready_pods("completion")] == [name]


def test_the_prompt_role_grows_under_load_and_shrinks_again_while_completion_stays(
    cluster: Cluster, url: str, expected: dict[Ask, str]
) -> None:
    most = {"prompt": 0, "completion": 0}

    def count() -> dict[str, int]:
        now = {role: len(cluster.ready_pods(role)) for role in most}
        for role, num_ready in now.items():
            most[role] = max(most[role], num_ready)
        return now

    long_prompts = [Ask(f"{number}. " + "The sea is deep and wide. " * 80, 1) for number in range(3)]
    with running_load(url, ASKS[:1], expected) as streams:
        with running_load(url, long_prompts) as prompts:
            eventually(lambda: count()["prompt"] == 3, "3 prompt pods", 240.0)
        eventually(lambda: count()["prompt"] == 1, "1 prompt pod again", 180.0)
    assert most == {"prompt": 3, "completion": 1}
    streams.assert_unharmed()
    prompts.assert_unharmed()


def upgrade(cluster: Cluster, revision: str, **values: object) -> None:
    """A rolling upgrade of both roles, where the revision is another one; no autoscalers."""
    changed = {f"{role}.podAnnotations": {"revision": revision} for role in ("prompt", "completion")}
    cluster.apply_chart("upgrade", [DEMO_VALUES], {**VALUES, **changed, **values})


def names(cluster: Cluster) -> set[str]:
    return {pod["metadata"]["name"] for role in ("prompt", "completion") for pod in cluster.ready_pods(role)}


def test_a_rolling_upgrade_of_both_roles_harms_no_stream(
    cluster: Cluster, url: str, expected_long: dict[Ask, str]
) -> None:
    before, num_logged = names(cluster), len(cluster.kubelet_log())
    (leaving,) = (pod["metadata"]["name"] for pod in cluster.ready_pods("completion"))
    with running_load(url, LONG_ASKS, expected_long) as load:
        upgrade(cluster, "rolled")
        eventually(lambda: len(cluster.all_pods("completion")) == 1, "the old engines have left", 60.0)
    assert not before & names(cluster)
    load.assert_unharmed()
    (drained,) = re.findall(r"draining (\d+) requests", cluster.log_of(leaving))
    assert int(drained) > 0, "no stream was in the middle when its engine was told to leave"
    assert "killed after" not in cluster.kubelet_log()[num_logged:]


def test_a_rolling_upgrade_of_the_proxy_harms_no_stream_of_clients_that_keep_their_connections(
    cluster: Cluster, url: str, expected: dict[Ask, str]
) -> None:
    (before,) = cluster.ready_pods("proxy")
    with running_load(url, ASKS, expected, repeats_unanswered=True) as load:
        upgrade(cluster, "rolled", **{"proxy.podAnnotations": {"revision": "next"}})
        eventually(lambda: len(cluster.all_pods("proxy")) == 1, "the old proxy has left", 60.0)
    (after,) = cluster.ready_pods("proxy")
    assert after["metadata"]["name"] != before["metadata"]["name"]
    load.assert_unharmed()


def two_completion_pods(cluster: Cluster, url: str) -> None:
    """The proxy knows both."""
    scale(cluster, COMPLETION, 2)
    eventually(lambda: len(cluster.ready_pods("completion")) == 2, "2 completion pods are ready", 180.0)
    eventually(lambda: engine_urls(url) == all_engines(cluster), "the proxy knows them", 30.0)


def test_streams_go_on_and_engines_stay_known_while_the_api_server_is_gone(
    cluster: Cluster, url: str, expected: dict[Ask, str]
) -> None:
    known = engine_urls(url)
    with running_load(url, ASKS, expected) as load:
        cluster.plane.stop_api_server()
        time.sleep(10.0)
        assert engine_urls(url) == known
        cluster.plane.start_api_server()
        two_completion_pods(cluster, url)
    load.assert_unharmed()


def test_an_engine_at_the_address_of_one_that_left_is_another_engine(
    cluster: Cluster, url: str, expected: dict[Ask, str]
) -> None:
    two_completion_pods(cluster, url)
    before = engines_by_address(cluster)
    with running_load(url, ASKS, expected) as load:
        scale(cluster, COMPLETION, 1)
        eventually(lambda: len(cluster.all_pods("completion")) == 1, "one has left", 60.0)
        two_completion_pods(cluster, url)
        after = engines_by_address(cluster)
    assert before.keys() == after.keys()
    assert len(before.items() - after.items()) == 1
    load.assert_unharmed()


def test_without_drains_and_migrations_the_same_upgrade_breaks_streams(
    cluster: Cluster, url: str, expected_long: dict[Ask, str]
) -> None:
    """The control: streams that nothing could break would prove nothing."""
    cluster.leave_no_grace()
    careless = {
        "proxy.settings.max_migrations": 0,
        **{f"{role}.preStopSeconds": 0 for role in ("prompt", "completion")},
        **{f"{role}.settings.grace_s": 0 for role in ("prompt", "completion")},
    }
    upgrade(cluster, "careless", **careless)
    eventually(lambda: len(cluster.all_pods("proxy")) == 1, "the proxy that migrates has left", 60.0)
    (proxy,) = cluster.ready_pods("proxy")
    assert {"name": "TANDEM_PROXY_MAX_MIGRATIONS", "value": "0"} in proxy["spec"]["containers"][0]["env"]
    (leaving,) = cluster.ready_pods("completion")
    assert leaving["spec"]["terminationGracePeriodSeconds"] == 0
    with running_load(url, LONG_ASKS, expected_long) as load:
        upgrade(cluster, "careless again", **careless)
        eventually(lambda: load.num_cut > 0, "a stream breaks that had text", 60.0)
        killed = f"{leaving['metadata']['name']}/engine: killed after 0 s"
        eventually(lambda: killed in cluster.kubelet_log(), "the old completion engine is killed", 60.0)
    assert load.changed == []
