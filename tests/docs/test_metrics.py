"""docs/metrics.md lists exactly the metrics that exist, with their types and meanings."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from engine.serving.metrics import ServiceMetrics
from engine.serving.settings import EngineServiceSettings
from engine.serving.supervisor import EngineSupervisor
from proxy.metrics import ProxyMetrics
from tests.engine.serving.builders import STATS

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def documented(section: str) -> dict[str, tuple[str, str]]:
    """name → (type, meaning) of one section's table."""
    text = DOCUMENT.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.+) \|$", text, re.MULTILINE)
    return {name: (kind, meaning) for name, kind, meaning in rows}


def exported(registry: CollectorRegistry) -> dict[str, tuple[str, str]]:
    return {
        family.name + ("_total" if family.type == "counter" else ""): (family.type, family.documentation)
        for family in registry.collect()
    }


def test_the_services_table_equals_what_a_service_exports() -> None:
    supervisor = EngineSupervisor(EngineServiceSettings(), "prompt")
    supervisor.stats = STATS
    supervisor.config = supervisor._settings.engine_config("prompt", "p", 1, "ipc://c", "ipc://e")
    metrics = ServiceMetrics("prompt", supervisor)
    assert documented("Prompt and completion service") == exported(metrics.registry)


def test_the_proxys_table_equals_what_a_proxy_exports() -> None:
    assert documented("Proxy") == exported(ProxyMetrics().registry)
