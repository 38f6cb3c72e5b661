"""Renders the chart with the real helm."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.k8s.tools import REPOSITORY, Tools

CHART = REPOSITORY / "helm" / "tandem"

Manifest = dict[str, Any]

BASE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one written in C is ten times as fast."""


class StrictLoader(BASE_LOADER):  # type: ignore[misc]
    """Refuses a mapping that has a key twice, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        assert not twice, f"{sorted(twice)} given twice, line {node.start_mark.line}"
        return dict(super().construct_mapping(node, deep))


class HelmFailure(Exception):
    """helm ended with an error; the message is what it printed."""


def run_helm(tools: Tools, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """What helm printed; raises `HelmFailure`. Nothing of the caller's own helm set-up is seen by it."""
    home = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "HELM_CACHE_HOME": "/tmp/tandem-helm-cache"}
    done = subprocess.run(
        [str(tools.helm), *arguments],
        capture_output=True,
        text=True,
        env={**home, **(environment or {})},
        timeout=60,
    )
    if done.returncode != 0:
        raise HelmFailure(done.stderr.strip())
    return done.stdout


def render(
    tools: Tools,
    release: str = "rel",
    namespace: str = "default",
    values: Mapping[str, Any] | None = None,
    files: Sequence[Path] = (),
    chart: Path = CHART,
    kubernetes: str = "1.37",
) -> list[Manifest]:
    """The manifests that `helm template` makes of the chart."""
    arguments = ["template", release, str(chart), "--namespace", namespace, "--kube-version", kubernetes]
    for file in files:
        arguments += ["--values", str(file)]
    for name, value in (values or {}).items():
        arguments += ["--set-json", f"{name}={json.dumps(value)}"]
    documents = yaml.load_all(run_helm(tools, *arguments), Loader=StrictLoader)
    return [document for document in documents if document]


def find(manifests: Sequence[Manifest], kind: str, name: str) -> Manifest:
    found = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name]
    assert len(found) == 1, f"{len(found)} of {kind} {name}: {names(manifests)}"
    return found[0]


def names(manifests: Sequence[Manifest]) -> list[tuple[str, str]]:
    return [(m["kind"], m["metadata"]["name"]) for m in manifests]


def container(manifest: Manifest) -> Manifest:
    """The only container of a workload or a pod."""
    spec = manifest["spec"]
    containers = spec.get("template", manifest)["spec"]["containers"]
    assert len(containers) == 1
    return dict(containers[0])


def variables(manifest: Manifest) -> dict[str, str]:
    """The environment variables with a value; those from elsewhere are left out."""
    return {entry["name"]: entry["value"] for entry in container(manifest)["env"] if "value" in entry}
