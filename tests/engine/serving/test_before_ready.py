"""T10: a request that comes while the engine starts is refused at once; it never hangs."""

import pytest
from fastapi.testclient import TestClient

from completion_service.app import create_app as create_completion_app
from completion_service.settings import CompletionServiceSettings
from engine.serving.supervisor import EngineSupervisor
from prompt_service.app import create_app as create_prompt_app
from prompt_service.settings import PromptServiceSettings

SAMPLING = {"max_tokens": 4}
PROMPT = {"request_id": "r", "handover_id": "h", "prompt_token_ids": [1, 2], "sampling": SAMPLING}
COMPLETION = PROMPT | {
    "prompt_engine": {"engine_id": "p", "epoch": 1, "control_address": "tcp://127.0.0.1:1"}
}


@pytest.mark.parametrize("role", ["prompt", "completion"])
def test_t10_requests_sent_while_an_engine_starts_are_refused_with_503(role: str) -> None:
    if role == "prompt":
        app = create_prompt_app(EngineSupervisor(PromptServiceSettings(), "prompt"), 1 << 20)
        path, body = "/v1/prompt", PROMPT
    else:
        supervisor = EngineSupervisor(CompletionServiceSettings(), "completion")
        app = create_completion_app("completion", supervisor, 1 << 20)
        path, body = "/v1/completion", COMPLETION
    client = TestClient(app)
    answer = client.post(path, json=body)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"].startswith("the engine is ")
