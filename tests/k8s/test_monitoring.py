"""The rules are what Prometheus takes, they say what they should, and every metric in the chart exists."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.docs.test_metrics import documented
from tests.k8s.chart import CHART, find, render
from tests.k8s.tools import Tools
from tests.k8s.value_sets import EVERYTHING

RULE_TESTS = Path(__file__).parent / "data" / "rules_test.yaml"


@pytest.fixture
def rules(tools: Tools, tmp_path: Path) -> Path:
    manifests = render(tools, values={"monitoring.rules.enabled": True})
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(find(manifests, "PrometheusRule", "rel-tandem-rules")["spec"]))
    return path


def test_promtool_takes_the_rules(promtool: Path, rules: Path) -> None:
    done = subprocess.run(
        [str(promtool), "check", "rules", "--lint-fatal", str(rules)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 rules found" in done.stdout


def test_rules_record_the_signals_and_alert(promtool: Path, rules: Path) -> None:
    (rules.parent / "rules_test.yaml").write_text(RULE_TESTS.read_text())
    done = subprocess.run(
        [str(promtool), "test", "rules", "rules_test.yaml"], cwd=rules.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_that_the_chart_names_is_one_that_the_processes_have(tools: Tools) -> None:
    known = {name for section in ("Prompt and completion service", "Proxy") for name in documented(section)}
    manifests = render(tools, values=EVERYTHING)
    scaling = [m for m in manifests if m["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")]
    named_in = [
        (CHART / "files" / "rules.yaml").read_text(),
        (CHART / "files" / "dashboard.json").read_text(),
        yaml.safe_dump_all(scaling),
    ]
    for text in named_in:
        named = set(re.findall(r"\btandem_(?:engine|proxy|service|transfer)_\w+", text))
        assert named
        assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in named} <= known


def test_the_dashboard_is_a_document_with_a_panel_for_each_signal(tools: Tools) -> None:
    manifests = render(tools, values={"monitoring.dashboard.enabled": True})
    dashboard = json.loads(find(manifests, "ConfigMap", "rel-tandem-dashboard")["data"]["tandem.json"])
    shown = json.dumps(dashboard["panels"])
    for signal in (
        "queued_prompt_tokens",
        "predicted_first_token",
        "kv_use",
        "sequence_use",
        "inter_token_p90",
    ):
        assert f"tandem_engine_{signal}" in shown
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
