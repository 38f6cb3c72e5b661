"""What one manifest says of another is so: selectors find their pods, names are of things that are there."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.k8s.chart import Manifest, container
from tests.k8s.tools import Tools
from tests.k8s.value_sets import VALUE_SETS, ValueSet

ROLE = "app.kubernetes.io/component"


class Release:
    """The manifests that a set of values renders to, by kind."""

    def __init__(self, manifests: list[Manifest]) -> None:
        self.manifests = manifests
        self.deployments = self.of("Deployment")
        self.pods = {m["metadata"]["labels"][ROLE]: m["spec"]["template"] for m in self.deployments}

    def of(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    def names(self, kind: str) -> set[str]:
        return {manifest["metadata"]["name"] for manifest in self.of(kind)}

    def roles(self, labels: dict[str, str]) -> list[str]:
        """Of the pods that have all these labels."""
        return [
            role for role, pod in self.pods.items() if labels.items() <= pod["metadata"]["labels"].items()
        ]


@pytest.fixture(scope="module", params=VALUE_SETS, ids=lambda value_set: value_set.name)
def release(tools: Tools, request: pytest.FixtureRequest) -> Release:
    value_set: ValueSet = request.param
    return Release(value_set.render(tools))


def test_what_selects_pods_finds_those_of_its_role(release: Release) -> None:
    assert set(release.pods) == {"proxy", "prompt", "completion"}
    kinds = ("Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "InferencePool")
    for manifest in (each for kind in kinds for each in release.of(kind)):
        spec = manifest["spec"]
        selector = spec["podSelector"] if manifest["kind"] == "NetworkPolicy" else spec["selector"]
        found = release.roles(selector.get("matchLabels", selector))
        assert found == [manifest["metadata"]["labels"][ROLE]], manifest
        assert manifest["metadata"]["name"].endswith(f"-{found[0]}")


def test_who_may_connect_are_the_releases_own_pods(release: Release) -> None:
    test_labels = {**release.pods["proxy"]["metadata"]["labels"], ROLE: "test"}
    for policy in release.of("NetworkPolicy"):
        own = [
            peer["podSelector"]
            for rule in policy["spec"]["ingress"]
            for peer in rule.get("from", ())
            if "app.kubernetes.io/name" in peer.get("podSelector", {}).get("matchLabels", {})
        ]
        allowed = {role for selector in own for role in matching(release, selector, test_labels)}
        is_proxy = policy["metadata"]["labels"][ROLE] == "proxy"
        assert allowed == ({"test"} if is_proxy else {"proxy", "prompt", "completion"})


def matching(release: Release, selector: dict[str, Any], test_labels: dict[str, str]) -> Iterator[str]:
    wanted = selector["matchLabels"].items()
    for role, labels in (
        *((r, p["metadata"]["labels"]) for r, p in release.pods.items()),
        ("test", test_labels),
    ):
        among = [labels[each["key"]] in each["values"] for each in selector.get("matchExpressions", ())]
        if wanted <= labels.items() and all(among):
            yield role


def test_named_ports_are_ports_of_the_pods(release: Release) -> None:
    for role, pod in release.pods.items():
        (engine,) = pod["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in engine["ports"]}
        variables = {entry["name"]: entry.get("value") for entry in engine["env"]}
        assert variables[f"TANDEM_{role.upper()}_PORT"] == str(ports["http"])
        probes = ("startupProbe", "readinessProbe", "livenessProbe")
        assert {engine[probe]["httpGet"]["port"] for probe in probes} == {"http"}
        (service,) = [m for m in release.of("Service") if m["metadata"]["labels"][ROLE] == role]
        assert [(p["name"], p["targetPort"]) for p in service["spec"]["ports"]] == [("http", "http")]


def test_volumes_accounts_and_workloads_that_are_named_are_there(release: Release) -> None:
    for deployment in release.deployments:
        pod = deployment["spec"]["template"]["spec"]
        there = {volume["name"] for volume in pod["volumes"]}
        containers = [*pod["containers"], *pod.get("initContainers", ())]
        assert {mount["name"] for each in containers for mount in each["volumeMounts"]} == there
        assert pod["serviceAccountName"] in release.names("ServiceAccount") | {"someone"}
    for scaler in (*release.of("HorizontalPodAutoscaler"), *release.of("ScaledObject")):
        assert scaler["spec"]["scaleTargetRef"]["name"] in release.names("Deployment")
    for binding in release.of("RoleBinding"):
        assert binding["roleRef"]["name"] in release.names("Role")
        assert {subject["name"] for subject in binding["subjects"]} <= release.names("ServiceAccount")


def test_a_proxy_looks_for_the_engines_services(release: Release) -> None:
    (proxy,) = [m for m in release.deployments if m["metadata"]["labels"][ROLE] == "proxy"]
    variables = {entry["name"]: entry.get("value", "") for entry in container(proxy)["env"]}
    for role in ("prompt", "completion"):
        (service,) = [m for m in release.of("Service") if m["metadata"]["labels"][ROLE] == role]
        name, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
        if variables["TANDEM_PROXY_DISCOVERY"] == "kubernetes":
            selector = variables[f"TANDEM_PROXY_{role.upper()}_SELECTOR"]
            assert selector == f"kubernetes.io/service-name={name}"
        else:
            assert variables[f"TANDEM_PROXY_{role.upper()}_URL"] == f"http://{name}.default.svc:{port}"


def test_monitors_find_every_pod_once(release: Release) -> None:
    for monitor in release.of("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        found = [m for m in release.of("Service") if wanted <= m["metadata"]["labels"].items()]
        assert [m["metadata"]["labels"][ROLE] for m in found] == [monitor["metadata"]["labels"][ROLE]]
    for monitor in release.of("PodMonitor"):
        assert set(matching(release, monitor["spec"]["selector"], {ROLE: ""})) == set(release.pods)


def test_entry_points_lead_to_the_proxy(release: Release) -> None:
    for ingress in release.of("Ingress"):
        for rule in ingress["spec"]["rules"]:
            (path,) = rule["http"]["paths"]
            service = path["backend"]["service"]
            (proxy,) = [m for m in release.of("Service") if m["metadata"]["name"] == service["name"]]
            assert proxy["metadata"]["labels"][ROLE] == "proxy"
            assert service["port"]["number"] == proxy["spec"]["ports"][0]["port"]
    for pool in release.of("InferencePool"):
        (port,) = pool["spec"]["targetPorts"]
        (served,) = release.pods["proxy"]["spec"]["containers"][0]["ports"]
        assert port["number"] == served["containerPort"]
