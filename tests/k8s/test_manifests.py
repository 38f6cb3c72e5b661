"""Every set of values renders to what Kubernetes takes, and to what it rendered to before."""

import os
from pathlib import Path

import pytest
import yaml

from tests.k8s.chart import CHART, Manifest, run_helm
from tests.k8s.schemas import InvalidManifest, check_manifest
from tests.k8s.tools import Tools
from tests.k8s.value_sets import VALUE_SETS, ValueSet

YAML_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
GOLDEN = Path(__file__).parent / "data" / "golden"
VERSIONS = ("1.25", "1.31", "1.37")
CUSTOM = ("monitoring.coreos.com", "keda.sh", "gateway.networking.k8s.io", "inference.networking.k8s.io")


def is_custom(manifest: Manifest) -> bool:
    return str(manifest["apiVersion"]).partition("/")[0] in CUSTOM


@pytest.mark.parametrize("file", [None, "values-cpu-demo.yaml", "values-gpu.yaml"])
def test_lint_finds_nothing(tools: Tools, file: str | None) -> None:
    values = ["--values", str(CHART / file)] if file else []
    assert "0 chart(s) failed" in run_helm(tools, "lint", "--strict", str(CHART), *values)


@pytest.mark.parametrize("kubernetes", VERSIONS)
def test_manifests_are_valid_by_the_strict_schemas(tools: Tools, kubernetes: str) -> None:
    checked = 0
    for value_set in VALUE_SETS:
        if _version(value_set.oldest) > _version(kubernetes):
            continue
        for manifest in value_set.render(tools, kubernetes):
            if not is_custom(manifest):
                check_manifest(manifest, kubernetes)
                checked += 1
    assert checked > 80


def test_the_schemas_would_find_a_wrong_field(tools: Tools) -> None:
    (manifest, *_) = VALUE_SETS[0].render(tools)
    with pytest.raises(InvalidManifest, match="spce"):
        check_manifest({**manifest, "spce": {}}, "1.37")


@pytest.mark.parametrize("value_set", VALUE_SETS, ids=lambda value_set: value_set.name)
def test_manifests_are_the_golden_ones(tools: Tools, value_set: ValueSet) -> None:
    path = GOLDEN / f"{value_set.name}.yaml"
    rendered = yaml.dump_all(value_set.render(tools), Dumper=YAML_DUMPER, width=120)
    if os.environ.get("TANDEM_UPDATE_GOLDEN"):
        path.write_text(rendered)
    assert rendered == path.read_text(), "after a wanted change: see tests/k8s/data/README.md"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
