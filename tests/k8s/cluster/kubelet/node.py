"""What a node says of itself, and what its pods find on it."""

from dataclasses import dataclass
from datetime import UTC, datetime

from tests.k8s.cluster.api import Json
from tests.k8s.cluster.network import NODE_IP


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    node_name: str
    folder: str
    api_host: str
    api_port: int
    ca: str
    token: str
    cpus: str = "2"
    memory: str = "4Gi"
    environment: dict[str, str]
    """What images would bring: PATH, PYTHONPATH and the like."""
    working_directory: str


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def node_status(settings: NodeSettings) -> Json:
    capacity = {"cpu": settings.cpus, "memory": settings.memory, "pods": "110", "ephemeral-storage": "50Gi"}
    return {
        "capacity": capacity,
        "allocatable": capacity,
        "addresses": [{"type": "InternalIP", "address": NODE_IP}],
        "conditions": [
            {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now()}
        ],
    }
