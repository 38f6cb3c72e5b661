"""What a service's probes say in every state of its engine; `docs/kubernetes.md` builds on it."""

import httpx
import pytest

from engine.serving.app import create_service_app
from engine.serving.metrics import ServiceMetrics
from engine.serving.settings import EngineServiceSettings
from engine.serving.supervisor import EngineSupervisor, State

STATES: dict[State, bool] = {
    "loading": False,
    "ready": True,
    "draining": False,
    "lost": False,
    "failed": False,
    "stopped": False,
}


@pytest.mark.parametrize("state", STATES)
async def test_a_service_is_ready_in_one_state_and_alive_in_all(state: State) -> None:
    """Liveness asks the HTTP process only: no prefill, however long, and no engine that loads ends a pod."""
    supervisor = EngineSupervisor(EngineServiceSettings(), "prompt")
    supervisor.state = state
    app = create_service_app("test", "prompt", supervisor, ServiceMetrics("prompt", supervisor), 1 << 20)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        ready, live = await client.get("/health/ready"), await client.get("/health/live")
    assert (ready.status_code == 200) == STATES[state]
    assert ready.json()["status"] == state
    assert live.status_code == 200
