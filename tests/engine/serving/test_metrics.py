"""docs/metrics.md lists exactly the metrics that exist."""

import re
from pathlib import Path

from engine.serving.metrics import ENGINE_METRICS, TRANSFER_METRIC, ServiceMetrics
from engine.serving.settings import EngineServiceSettings
from engine.serving.supervisor import EngineSupervisor
from tests.engine.serving.builders import STATS

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


def documented(section: str) -> dict[str, tuple[str, str]]:
    """name → (type, meaning) of one section's table."""
    text = DOCUMENT.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.+) \|$", text, re.MULTILINE)
    return {name: (kind, meaning) for name, kind, meaning in rows}


def test_the_table_equals_what_a_service_exports() -> None:
    supervisor = EngineSupervisor(EngineServiceSettings(), "prompt")
    supervisor.stats = STATS
    metrics = ServiceMetrics("prompt", supervisor)
    exported: dict[str, tuple[str, str]] = {}
    for family in metrics.registry.collect():
        suffix = "_total" if family.type == "counter" else ""
        exported[family.name + suffix] = (family.type, family.documentation)
    assert documented("Prompt and completion service") == exported
    assert {metric.name for metric in ENGINE_METRICS} | {TRANSFER_METRIC} <= set(exported)
