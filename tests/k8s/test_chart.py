"""What the chart promises: names, selectors, rights, secrets, settings, scaling."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from helm.chart_schema import FILE, OWNED_BY_CHART, SETTINGS, text
from settings.loading import load_settings
from tests.k8s.chart import CHART, HelmFailure, Manifest, container, find, names, render, variables
from tests.k8s.tools import Tools
from tests.k8s.value_sets import EVERYTHING

FIRST_CHART = Path(__file__).parent / "data" / "tandem-0.1.0.tgz"
ROLES = ("proxy", "prompt", "completion")
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


def workloads(manifests: list[Manifest]) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in ("Deployment", "StatefulSet")]


def selectors(manifests: list[Manifest]) -> dict[str, Any]:
    return {
        f"{m['kind']}/{m['metadata']['name']}": m["spec"]["selector"]
        for m in manifests
        if m["kind"] in ("Deployment", "Service")
    }


def test_the_committed_schema_is_what_the_settings_say() -> None:
    assert FILE.read_text() == text(), "run: make chart-schema"


@pytest.mark.parametrize("role", ROLES)
def test_every_setting_is_a_value_or_the_charts_own(role: str) -> None:
    schema = json.loads(FILE.read_text())
    allowed = set(schema["properties"][role]["properties"]["settings"]["properties"])
    assert allowed == set(SETTINGS[role].model_fields) - OWNED_BY_CHART


@pytest.mark.parametrize("role", ROLES)
def test_every_variable_of_a_pod_is_one_that_its_process_knows(tools: Tools, role: str) -> None:
    deployment = find(render(tools, values=EVERYTHING), "Deployment", f"rel-tandem-{role}")
    prefix = f"TANDEM_{role.upper()}_"
    known = {(prefix + name).upper() for name in SETTINGS[role].model_fields}
    given = [entry["name"] for entry in container(deployment)["env"]]
    assert {name for name in given if name.startswith("TANDEM_")} <= known
    assert len(given) == len(set(given))


@pytest.mark.parametrize("role", ROLES)
def test_every_value_of_a_variable_is_one_that_its_process_takes(
    tools: Tools, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = find(render(tools, values=EVERYTHING), "Deployment", f"rel-tandem-{role}")
    for name, value in variables(deployment).items():
        monkeypatch.setenv(name, value.replace("$(POD_IP)", "10.0.0.1"))
    monkeypatch.setattr("sys.argv", ["program"])
    settings = load_settings(SETTINGS[role], "program", [])
    for name, wanted in EVERYTHING.get(f"{role}.settings", {}).items():
        assert getattr(settings, name) == wanted


def test_a_setting_reaches_its_process_as_its_flag_would(tools: Tools) -> None:
    settings = {"kv_bytes": 1073741824, "lease_s": 0.5, "overlap": True, "transport": "zmq"}
    manifests = render(tools, values={"prompt.settings": settings})
    given = variables(find(manifests, "Deployment", "rel-tandem-prompt"))
    assert {name: given[f"TANDEM_PROMPT_{name.upper()}"] for name in settings} == {
        "kv_bytes": "1073741824",
        "lease_s": "0.5",
        "overlap": "true",
        "transport": "zmq",
    }


@pytest.mark.parametrize(
    ("resources", "num_threads"),
    [
        ({"requests": {"cpu": "1500m"}, "limits": {"cpu": None}}, "2"),
        ({"requests": {"cpu": "100m"}, "limits": {"cpu": 4}}, "4"),
        ({"requests": {"cpu": 8}}, "8"),
        ({"requests": {"cpu": 0.25}}, "1"),
        ({"requests": {"cpu": None}}, None),
    ],
)
def test_an_engine_has_as_many_threads_as_its_container_has_processors(
    tools: Tools, resources: dict[str, Any], num_threads: str | None
) -> None:
    manifests = render(tools, values={"prompt.resources": resources})
    given = variables(find(manifests, "Deployment", "rel-tandem-prompt"))
    assert given.get("TANDEM_PROMPT_NUM_THREADS") == num_threads
    manifests = render(tools, values={"prompt.resources": resources, "prompt.settings.num_threads": 3})
    entries = container(find(manifests, "Deployment", "rel-tandem-prompt"))["env"]
    assert [entry["value"] for entry in entries if entry["name"].endswith("NUM_THREADS")] == ["3"]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("given", "grace_s"), [({}, 30), ({"grace_s": None}, 30), ({"grace_s": 7.5}, 8)])
def test_a_pod_is_killed_only_after_its_process_has_had_its_grace(
    tools: Tools, role: str, given: dict[str, Any], grace_s: int
) -> None:
    assert SETTINGS[role].model_fields["grace_s"].default == 30
    manifests = render(tools, values={f"{role}.settings": given, f"{role}.preStopSeconds": 4})
    pod = find(manifests, "Deployment", f"rel-tandem-{role}")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 4 + grace_s + 10


def test_a_gpu_fleets_proxies_wait_as_long_as_its_completion_engines(tools: Tools) -> None:
    manifests = render(tools, files=[CHART / "values-gpu.yaml"])
    proxy, completion = (
        variables(find(manifests, "Deployment", f"rel-tandem-{role}"))[f"TANDEM_{role.upper()}_GRACE_S"]
        for role in ("proxy", "completion")
    )
    assert proxy == completion == "300"


def test_labels_of_a_role_win_over_common_ones(tools: Tools) -> None:
    labels = {"commonLabels": {"team": "models", "stage": "live"}, "prompt.podLabels": {"team": "prompts"}}
    manifests = render(tools, values=labels)
    pods = {m["metadata"]["name"]: m["spec"]["template"]["metadata"]["labels"] for m in workloads(manifests)}
    assert {name: (pod["team"], pod["stage"]) for name, pod in pods.items()} == {
        "rel-tandem-proxy": ("models", "live"),
        "rel-tandem-prompt": ("prompts", "live"),
        "rel-tandem-completion": ("models", "live"),
    }


def test_without_an_account_of_its_own_a_pod_has_the_namespaces(tools: Tools) -> None:
    values = {"proxy.serviceAccount.create": False, "prompt.serviceAccount": {"create": False, "name": "me"}}
    manifests = render(tools, values=values)
    accounts = [m["spec"]["template"]["spec"]["serviceAccountName"] for m in workloads(manifests)]
    assert sorted(accounts) == ["default", "me", "rel-tandem-completion"]
    (subject,) = find(manifests, "RoleBinding", "rel-tandem-proxy")["subjects"]
    assert subject["name"] == "default"


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (
            {"prompt.autoscaling.hpa.enabled": True, "prompt.autoscaling.keda.enabled": True},
            "/prompt/autoscaling",
        ),
        ({"prompt.settings": {"kv_byte": 1}}, "'kv_byte' not allowed"),
        ({"prompt.settings": {"kv_bytes": 0}}, "/prompt/settings/kv_bytes"),
        ({"prompt.settings": {"transport": "carrier-pigeon"}}, "/prompt/settings/transport"),
        ({"completion.settings": {"service_token": "secret"}}, "'service_token' not allowed"),
        ({"proxy.settings": {"worker_number": 1}}, "'worker_number' not allowed"),
        ({"commonLabels": {"app.kubernetes.io/instance": "x"}}, "app.kubernetes.io/instance"),
        ({"prompt.podLabels": {"app.kubernetes.io/component": "x"}}, "app.kubernetes.io/component"),
        ({"prompt.podAnnotations": {"checksum/settings": "x"}}, "checksum/settings"),
        ({"completion.nodesPerEngine": 2}, "/completion/nodesPerEngine"),
        ({"model.source": "pvc"}, "/model"),
        ({"model.name": "other"}, "/model"),
        ({"rdma.resource": "nvidia.com/gpu"}, "/rdma/resource"),
        ({"prompt.replicas": -1}, "/prompt/replicas"),
        ({"promt": {}}, "'promt' not allowed"),
        ({"ingress.enabled": True}, "/ingress"),
        ({"monitoring.podMonitor.enabled": True, "monitoring.serviceMonitor.enabled": True}, "/monitoring"),
        ({"proxy.discovery": "static", "prompt.replicas": 2}, "proxy.discovery: static knows one engine"),
        (
            {"proxy.discovery": "static", "completion.autoscaling.hpa.enabled": True},
            "proxy.discovery: static knows one engine",
        ),
        ({"prompt.extraEnv": [{"name": "TANDEM_PROMPT_PORT", "value": "1"}]}, "prompt.settings"),
        (
            {
                "prompt.autoscaling.hpa.enabled": True,
                "prompt.autoscaling.targets.queuedPromptTokens": None,
            },
            "prompt.autoscaling.targets",
        ),
    ],
)
def test_wrong_values_are_refused_by_name(tools: Tools, values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(HelmFailure, match=re.escape(complaint)):
        render(tools, values=values)


def test_an_image_volume_is_refused_where_kubernetes_has_none(tools: Tools) -> None:
    image = {"source": "image", "name": "m", "image": {"reference": "r"}}
    with pytest.raises(HelmFailure, match=r"1\.31 or newer"):
        render(tools, values={"model": image}, kubernetes="1.30")


@pytest.mark.parametrize("release", ["rel", "a.b", "1st", "x" * 53, "tandem", "my.long.name-" + "y" * 40])
def test_names_are_those_of_services_and_labels(tools: Tools, release: str) -> None:
    for kind, name in names(render(tools, release)):
        assert DNS_LABEL.fullmatch(name), (kind, name)


def test_names_of_two_releases_in_one_namespace_never_meet(tools: Tools) -> None:
    releases = [
        "a.b",
        "a-b",
        "x" * 53,
        "x" * 52,
        "tandem",
        "tandem-tandem",
        "a-tandem",
        "tandem-a",
        "a",
        "a-b-tandem",
    ]
    seen = [name for release in releases for name in names(render(tools, release))]
    assert len(seen) == len(set(seen))


def test_selectors_of_two_releases_in_one_namespace_find_their_own_pods_only(tools: Tools) -> None:
    first, second = (render(tools, release) for release in ("one", "two"))
    pods = [m["spec"]["template"]["metadata"]["labels"] for m in workloads(second)]
    for selector in selectors(first).values():
        wanted = selector.get("matchLabels", selector)
        assert not any(wanted.items() <= labels.items() for labels in pods)


def test_one_release_name_in_two_namespaces_stays_in_its_own(tools: Tools) -> None:
    first, second = (render(tools, namespace=namespace) for namespace in ("one", "two"))
    assert selectors(first) == selectors(second)
    assert "two" not in yaml.safe_dump_all(first)
    (subject,) = find(second, "RoleBinding", "rel-tandem-proxy")["subjects"]
    assert subject["namespace"] == "two"


def test_an_upgrade_from_the_first_chart_keeps_every_selector(tools: Tools) -> None:
    assert CHART != FIRST_CHART
    for release in ("rel", "a.b", "x" * 53):
        assert selectors(render(tools, release)) == selectors(render(tools, release, chart=FIRST_CHART))


def test_the_proxy_may_look_up_endpoint_slices_and_nothing_else(tools: Tools) -> None:
    manifests = render(tools)
    rights = [(m["kind"], m.get("rules")) for m in manifests if m["kind"] in ("Role", "ClusterRole")]
    slices = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"]}
    assert rights == [("Role", [{**slices, "verbs": ["get", "list", "watch"]}])]
    tokens = {
        m["metadata"]["name"]: m["spec"]["template"]["spec"]["automountServiceAccountToken"]
        for m in workloads(manifests)
    }
    assert tokens == {"rel-tandem-proxy": True, "rel-tandem-prompt": False, "rel-tandem-completion": False}


@pytest.mark.parametrize("discovery", ["static", "dns"])
def test_without_the_api_there_are_no_rights(tools: Tools, discovery: str) -> None:
    manifests = render(tools, values={"proxy.discovery": discovery})
    assert not {"Role", "RoleBinding"} & {kind for kind, _ in names(manifests)}
    urls = variables(find(manifests, "Deployment", "rel-tandem-proxy"))
    assert urls["TANDEM_PROXY_PROMPT_URL"] == "http://rel-tandem-prompt.default.svc:7001"


@pytest.mark.parametrize("has_pool", [False, True])
def test_a_route_goes_to_the_inference_pool_where_there_is_one(tools: Tools, has_pool: bool) -> None:
    pool = {"inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}}} if has_pool else {}
    route = {"httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]}}
    manifests = render(tools, values={**route, **pool})
    (rule,) = find(manifests, "HTTPRoute", "rel-tandem-proxy")["spec"]["rules"]
    kind, port = ("InferencePool", None) if has_pool else ("Service", 80)
    (backend,) = rule["backendRefs"]
    assert (backend.get("kind", "Service"), backend.get("port")) == (kind, port)
    assert find(manifests, kind, backend["name"])["apiVersion"].partition("/")[0] in (
        backend.get("group"),
        "v1",
    )


def test_pods_are_nobody_without_privilege_also_with_rdma(tools: Tools) -> None:
    for deployment in workloads(render(tools, values={"rdma.enabled": True})):
        pod, security = deployment["spec"]["template"]["spec"], container(deployment)["securityContext"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert "privileged" not in security
        is_engine = not deployment["metadata"]["name"].endswith("proxy")
        assert security["capabilities"] == {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if is_engine else {})}
        limits = container(deployment)["resources"]["limits"]
        assert limits.get("rdma/hca") == ("1" if is_engine else None)


def test_who_is_scaled_has_no_replicas_of_its_own(tools: Tools) -> None:
    manifests = render(
        tools, values={"prompt.autoscaling.hpa.enabled": True, "completion.autoscaling.keda.enabled": True}
    )
    replicas = {m["metadata"]["name"]: m["spec"].get("replicas") for m in workloads(manifests)}
    assert replicas == {"rel-tandem-proxy": 1, "rel-tandem-prompt": None, "rel-tandem-completion": None}
    assert find(manifests, "HorizontalPodAutoscaler", "rel-tandem-prompt")
    assert find(manifests, "ScaledObject", "rel-tandem-completion")


def test_k3_each_role_scales_by_its_own_signals_with_its_own_cool_down(tools: Tools) -> None:
    values = {f"{role}.autoscaling.hpa.enabled": True for role in ("prompt", "completion")}
    values |= {"prompt.autoscaling.targets.firstTokenSeconds": 1.5}
    manifests = render(tools, values=values)
    seen = {}
    for role in ("prompt", "completion"):
        spec = find(manifests, "HorizontalPodAutoscaler", f"rel-tandem-{role}")["spec"]
        targets = {m["pods"]["metric"]["name"]: m["pods"]["target"]["averageValue"] for m in spec["metrics"]}
        seen[role] = (targets, spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"])
    assert seen == {
        "prompt": (
            {
                "tandem_engine_queued_prompt_tokens": "8192",
                "tandem_engine_predicted_first_token_seconds": "1.5",
            },
            300,
        ),
        "completion": ({"tandem_engine_kv_use": "0.8", "tandem_engine_sequence_use": "0.8"}, 600),
    }


def test_k7_an_engine_tells_the_others_its_pods_address(tools: Tools) -> None:
    manifests = render(tools)
    for role in ("prompt", "completion"):
        deployment = find(manifests, "Deployment", f"rel-tandem-{role}")
        assert variables(deployment)[f"TANDEM_{role.upper()}_CONTROL_HOST"] == "$(POD_IP)"
        pod_ip = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        assert pod_ip in container(deployment)["env"]


def test_a_pod_has_time_for_its_drain(tools: Tools) -> None:
    values = {"completion.settings": {"grace_s": 120.5}, "completion.preStopSeconds": 4}
    deployment = find(render(tools, values=values), "Deployment", "rel-tandem-completion")
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 4 + 121 + 10


def test_a_changed_setting_rolls_its_own_role_only(tools: Tools) -> None:
    before, after = render(tools), render(tools, values={"prompt.settings": {"block_size": 16}})
    rolled = [
        m["metadata"]["name"]
        for m, other in zip(workloads(before), workloads(after), strict=True)
        if m["spec"]["template"] != other["spec"]["template"]
    ]
    assert rolled == ["rel-tandem-prompt"]


def test_secrets_are_named_and_never_written(tools: Tools) -> None:
    manifests = render(tools, values={**EVERYTHING, "serviceToken.existingSecret": "token"})
    assert "Secret" not in {kind for kind, _ in names(manifests)}
    proxy = find(manifests, "Deployment", "rel-tandem-proxy")
    given = variables(proxy)
    assert given["TANDEM_PROXY_API_KEYS_FILE"] == "/etc/tandem/api-keys/keys"
    assert given["TANDEM_PROXY_SERVICE_TOKEN_FILE"] == "/etc/tandem/service-token/token"
    mounted = {volume["secret"]["secretName"] for volume in _volumes(proxy) if "secret" in volume}
    assert mounted == {"keys", "token"}


def test_every_pod_reads_the_model_from_where_clients_name_it(tools: Tools) -> None:
    download = {"source": "download", "name": "qwen3-8b", "download": {"repository": "Qwen/Qwen3-8B"}}
    for deployment in workloads(render(tools, values={"model": download})):
        given = variables(deployment)
        (model,) = [value for name, value in given.items() if name.endswith("_MODEL")]
        mounts = {m["name"]: m["mountPath"] for m in container(deployment)["volumeMounts"]}
        assert model == mounts["model"] == "/models/qwen3-8b"


def test_the_demo_values_fit_two_processors_and_four_gibibytes(tools: Tools) -> None:
    manifests = render(tools, files=[CHART / "values-cpu-demo.yaml"])
    pods = [*workloads(manifests), find(manifests, "Pod", "rel-tandem-test")]
    limits = [container(pod)["resources"]["limits"] for pod in pods]
    assert sum(_quantity(limit["cpu"]) for limit in limits) <= 2
    assert sum(_quantity(limit["memory"]) for limit in limits) <= 4 * 2**30


def test_probes_ask_what_the_processes_answer(tools: Tools) -> None:
    for deployment in workloads(render(tools)):
        spec = container(deployment)
        paths = {name: spec[name]["httpGet"]["path"] for name in ("readinessProbe", "livenessProbe")}
        assert paths == {"readinessProbe": "/health/ready", "livenessProbe": "/health/live"}
        assert spec["livenessProbe"]["periodSeconds"] * spec["livenessProbe"]["failureThreshold"] >= 60


def _volumes(deployment: Manifest) -> list[Manifest]:
    return list(deployment["spec"]["template"]["spec"]["volumes"])


def _quantity(text: object) -> float:
    number, unit = re.fullmatch(r"([0-9.]+)(m|Mi|Gi)?", str(text)).groups()  # type: ignore[union-attr]
    return float(number) * {None: 1, "m": 0.001, "Mi": 2**20, "Gi": 2**30}[unit]
