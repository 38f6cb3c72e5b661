"""Values that exercise every branch of the chart; golden files and the schema matrix use them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.k8s.chart import CHART, Manifest, render
from tests.k8s.tools import Tools


@dataclass(frozen=True, slots=True)
class ValueSet:
    name: str
    values: Mapping[str, Any]
    files: tuple[Path, ...] = ()
    oldest: str = "1.25"
    """The first Kubernetes that can take it."""
    release: str = "rel"

    def render(self, tools: Tools, kubernetes: str = "1.37") -> list[Manifest]:
        return render(tools, self.release, values=self.values, files=self.files, kubernetes=kubernetes)


EVERYTHING: Mapping[str, Any] = {
    "commonLabels": {"team": "models"},
    "imagePullSecrets": [{"name": "registry"}],
    "images.engine.digest": "sha256:" + "0" * 64,
    "proxy.discovery": "kubernetes",
    "proxy.replicas": 2,
    "proxy.settings": {"first_token_limit_s": 2.5, "token_link": False, "max_body_bytes": 16777216},
    "proxy.service": {"type": "LoadBalancer", "port": 8080, "annotations": {"a.example/b": "c"}},
    "proxy.autoscaling.hpa.enabled": True,
    "prompt.autoscaling.hpa.enabled": True,
    "prompt.autoscaling.targets.firstTokenSeconds": 1.5,
    "completion.autoscaling.keda.enabled": True,
    "completion.autoscaling.keda.authenticationRef": {"name": "prometheus"},
    "completion.autoscaling.targets.interTokenSeconds": 0.05,
    "prompt.gpu.count": 2,
    "prompt.settings": {"kv_bytes": 34359738368, "grace_s": 120},
    "prompt.nodeSelector": {"gpu": "yes"},
    "prompt.tolerations": [{"key": "gpu", "operator": "Exists"}],
    "prompt.affinity": {"podAntiAffinity": {}},
    "prompt.topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "prompt.priorityClassName": "high",
    "prompt.runtimeClassName": "nvidia",
    "prompt.schedulerName": "other",
    "prompt.podAnnotations": {"k8s.v1.cni.cncf.io/networks": "rdma"},
    "prompt.podLabels": {"rack": "1"},
    "prompt.extraEnv": [{"name": "UCX_TLS", "value": "rc,cuda"}],
    "prompt.podDisruptionBudget.maxUnavailable": "25%",
    "completion.serviceAccount": {"create": False, "name": "someone"},
    "rdma": {"enabled": True, "resource": "rdma/hca", "count": 1, "runAsUser": 0},
    "apiKeys.existingSecret": "keys",
    "serviceToken.existingSecret": "token",
    "networkPolicy": {
        "enabled": True,
        "clients": [{"namespaceSelector": {"matchLabels": {"apps": "yes"}}}],
        "scrapers": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}],
    },
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": "3600"},
        "hosts": ["llm.example.org"],
        "tls": [{"hosts": ["llm.example.org"], "secretName": "tls"}],
    },
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["llm.example.org"]},
    "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
    "monitoring.podMonitor.enabled": True,
    "monitoring.rules.enabled": True,
    "monitoring.dashboard.enabled": True,
}

DOWNLOAD: Mapping[str, Any] = {
    "model": {
        "source": "download",
        "name": "qwen3-8b",
        "download": {"repository": "Qwen/Qwen3-8B", "revision": "abc", "tokenSecret": {"name": "hf"}},
    },
    "monitoring.serviceMonitor.enabled": True,
    "proxy.discovery": "dns",
}

VALUE_SETS = (
    ValueSet("default", {}),
    ValueSet("cpu-demo", {}, (CHART / "values-cpu-demo.yaml",)),
    ValueSet("gpu", {}, (CHART / "values-gpu.yaml",)),
    ValueSet("everything", EVERYTHING),
    ValueSet("download", DOWNLOAD),
    ValueSet(
        "shared-download",
        {"model": {**DOWNLOAD["model"], "download": {"repository": "a/b", "claimName": "models"}}},
    ),
    ValueSet(
        "pvc",
        {
            "model": {
                "source": "pvc",
                "name": "llama",
                "file": "llama-8b.gguf",
                "pvc": {"claimName": "models", "subPath": "llama"},
            }
        },
        release="a.b",
    ),
    ValueSet(
        "image-volume",
        {"model": {"source": "image", "name": "m", "image": {"reference": "registry.example/m:1"}}},
        oldest="1.31",
    ),
)
