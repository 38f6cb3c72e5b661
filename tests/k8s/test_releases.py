"""Real helm installs, tests, upgrades, rolls back and uninstalls the chart against an API server."""

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.api_stub import ApiStub
from tests.k8s.chart import CHART, HelmFailure, container, run_helm, variables
from tests.k8s.test_chart import FIRST_CHART
from tests.k8s.tools import Tools
from tests.k8s.value_sets import EVERYTHING

Helm = Callable[..., str]
KINDS = (
    "deployments",
    "services",
    "serviceaccounts",
    "roles",
    "rolebindings",
    "poddisruptionbudgets",
    "secrets",
)
PROMPT = "rel-tandem-prompt"


@pytest.fixture
def api() -> Iterator[ApiStub]:
    with ApiStub() as api:
        yield api


@pytest.fixture
def helm(tools: Tools, api: ApiStub, tmp_path: Path) -> Helm:
    config = api.kubeconfig(tmp_path / "kubeconfig")

    def run(*arguments: str) -> str:
        return run_helm(tools, *arguments, environment={"KUBECONFIG": str(config)})

    return run


def installed(api: ApiStub) -> dict[str, list[str]]:
    found = {kind: [manifest["metadata"]["name"] for manifest in api.find(kind)] for kind in KINDS}
    return {
        kind: sorted(name for name in names if not name.startswith("sh.helm"))
        for kind, names in found.items()
    }


def generations(api: ApiStub) -> dict[str, int]:
    return {m["metadata"]["name"]: m["metadata"]["generation"] for m in api.find("deployments")}


def test_a_release_lives_from_install_to_uninstall(api: ApiStub, helm: Helm) -> None:
    notes = helm("install", "rel", str(CHART), "--wait", "--timeout", "60s")
    assert "port-forward service/rel-tandem-proxy 8000:80" in notes
    roles = ["rel-tandem-completion", PROMPT, "rel-tandem-proxy"]
    assert installed(api) == {
        **dict.fromkeys(("deployments", "services", "serviceaccounts", "poddisruptionbudgets"), roles),
        **{kind: ["rel-tandem-proxy"] for kind in ("roles", "rolebindings")},
        "secrets": [],
    }
    assert "Succeeded" in helm("test", "rel")

    without_budget = ("--set", "prompt.podDisruptionBudget.enabled=false")
    helm("upgrade", "rel", str(CHART), "--set", "prompt.settings.max_num_seqs=8", *without_budget)
    assert PROMPT not in installed(api)["poddisruptionbudgets"]
    assert generations(api) == {"rel-tandem-completion": 1, PROMPT: 2, "rel-tandem-proxy": 1}
    assert variables(api.get("deployments", PROMPT))["TANDEM_PROMPT_MAX_NUM_SEQS"] == "8"

    helm("rollback", "rel", "1")
    assert "TANDEM_PROMPT_MAX_NUM_SEQS" not in variables(api.get("deployments", PROMPT))
    assert [line.split()[0] for line in helm("history", "rel").splitlines()[1:]] == ["1", "2", "3"]

    helm("uninstall", "rel")
    assert installed(api) == {kind: [] for kind in KINDS}


def test_the_notes_name_what_clients_ask_for(helm: Helm) -> None:
    model = {"source": "pvc", "name": "llama", "file": "gguf/llama-8b.gguf", "pvc": {"claimName": "models"}}
    values = ("--set-json", f"model={json.dumps(model)}", "--set", "apiKeys.existingSecret=keys")
    notes = helm("install", "rel", str(CHART), *values)
    assert '{"model": "llama-8b",' in notes
    assert '"authorization: Bearer $KEY"' in notes


def test_a_failed_test_pod_fails_helm_test(tools: Tools, tmp_path: Path) -> None:
    with ApiStub(outcome_of_pod=lambda pod: "Failed") as api:
        environment = {"KUBECONFIG": str(api.kubeconfig(tmp_path / "kubeconfig"))}
        run_helm(tools, "install", "rel", str(CHART), environment=environment)
        with pytest.raises(HelmFailure, match="rel-tandem-test"):
            run_helm(tools, "test", "rel", environment=environment)


def test_what_an_autoscaler_has_set_survives_an_upgrade(api: ApiStub, helm: Helm) -> None:
    scaled = ("--set", "prompt.autoscaling.hpa.enabled=true")
    helm("install", "rel", str(CHART), *scaled)
    api.scale(PROMPT, 3)
    helm("upgrade", "rel", str(CHART), *scaled, "--set", "prompt.settings.max_num_seqs=8")
    assert api.get("deployments", PROMPT)["spec"]["replicas"] == 3
    assert api.get("horizontalpodautoscalers", PROMPT)["spec"]["maxReplicas"] == 4


def test_without_an_autoscaler_the_chart_owns_the_replicas(api: ApiStub, helm: Helm) -> None:
    helm("install", "rel", str(CHART))
    api.scale(PROMPT, 3)
    with pytest.raises(HelmFailure, match=r"conflict with \"horizontal-pod-autoscaler\": \.spec\.replicas"):
        helm("upgrade", "rel", str(CHART), "--set", "prompt.replicas=2")


def test_the_first_chart_can_be_upgraded_to_this_one(api: ApiStub, helm: Helm) -> None:
    helm("install", "rel", str(FIRST_CHART))
    before = {m["metadata"]["name"]: m["metadata"]["uid"] for m in api.find("deployments")}
    helm("upgrade", "rel", str(CHART))
    assert {m["metadata"]["name"]: m["metadata"]["uid"] for m in api.find("deployments")} == before
    helm("rollback", "rel", "1")
    assert installed(api)["poddisruptionbudgets"] == []


def test_two_releases_share_a_namespace(api: ApiStub, helm: Helm) -> None:
    helm("install", "a.b", str(CHART))
    helm("install", "a-b", str(CHART))
    assert len(installed(api)["deployments"]) == 6
    helm("uninstall", "a.b")
    assert installed(api)["deployments"] == [
        f"a-b-tandem-{role}" for role in ("completion", "prompt", "proxy")
    ]


def test_a_drawn_service_token_survives_upgrades(api: ApiStub, helm: Helm) -> None:
    def token() -> bytes:
        return base64.b64decode(api.get("secrets", "rel-tandem-service-token")["data"]["token"])

    helm("install", "rel", str(CHART), "--set", "serviceToken.generate=true")
    first = token()
    assert len(first) == 48
    helm("upgrade", "rel", str(CHART), "--set", "serviceToken.generate=true", "--set", "prompt.replicas=2")
    assert token() == first


def test_an_install_that_broke_off_is_repeated(api: ApiStub, helm: Helm) -> None:
    api.faults.fail("patch", "deployments", 504, times=20)
    with pytest.raises(HelmFailure, match="injected"):
        helm("install", "rel", str(CHART))
    api.faults.clear()
    helm("upgrade", "--install", "rel", str(CHART))
    assert len(installed(api)["deployments"]) == 3


def test_a_manifest_that_kubernetes_does_not_know_is_refused(api: ApiStub, helm: Helm) -> None:
    wrong: Any = '{"runAsNoRoot": true}'
    with pytest.raises(HelmFailure, match="runAsNoRoot"):
        helm("install", "rel", str(CHART), "--set-json", f"podSecurityContext={wrong}")


def test_every_object_of_a_full_set_of_values_is_taken(api: ApiStub, helm: Helm) -> None:
    values = [a for name, value in EVERYTHING.items() for a in ("--set-json", f"{name}={json.dumps(value)}")]
    helm("install", "rel", str(CHART), *values)
    engine = container(api.get("deployments", PROMPT))
    assert engine["resources"]["limits"]["rdma/hca"] == "1"
    for kind in ("scaledobjects", "inferencepools", "httproutes", "podmonitors", "prometheusrules"):
        assert api.find(kind)
