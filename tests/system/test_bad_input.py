"""Whatever a client sends, it gets a 4xx in OpenAI's shape that names the field; no 500, no hang."""

import pytest

from tests.system.processes import RunningStack, post

pytestmark = pytest.mark.system

MODEL = "smollm2-135m-instruct"
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (CHAT, {"model": "gpt-9", "messages": MESSAGES}, 404, "model"),
        (CHAT, {"model": MODEL, "messages": []}, 400, "messages"),
        (CHAT, {"model": MODEL}, 400, "messages"),
        (CHAT, {"model": MODEL, "messages": [{"role": "wizard", "content": "Hi"}]}, 400, "messages"),
        (CHAT, {"model": MODEL, "messages": MESSAGES, "max_tokens": -1}, 400, "max_tokens"),
        (CHAT, {"model": MODEL, "messages": MESSAGES, "max_tokens": 10**12}, 400, "max_tokens"),
        (CHAT, {"model": MODEL, "messages": MESSAGES, "max_tokens": "many"}, 400, "max_tokens"),
        (CHAT, {"model": MODEL, "messages": MESSAGES, "temperature": -3}, 400, "temperature"),
        (CHAT, {"model": MODEL, "messages": "Hi"}, 400, "messages"),
        (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "a b " * 9000}]}, 400, "messages"),
        (TEXT, {"model": MODEL, "prompt": ""}, 400, "prompt"),
        (TEXT, {"model": MODEL, "prompt": []}, 400, "prompt"),
        (TEXT, {"model": MODEL, "prompt": [10**9]}, 400, "prompt"),
        (TEXT, {"model": MODEL, "prompt": [5] * 9000}, 400, "prompt"),
        (TEXT, {"model": MODEL, "prompt": {"text": "Hi"}}, 400, "prompt"),
        (CHAT, b'{"model": ', 400, None),
        (CHAT, b"\xff\xfe", 400, None),
        (CHAT, b"[" * 100_000, 400, None),
        (CHAT, b'{"model": "' + b"x" * 10_000_000 + b'"}', 413, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_refused_naming_the_field(
    stack: RunningStack,
    path: str,
    body: dict[str, object] | bytes,
    status: int,
    param: str | None,
    stream: bool,
) -> None:
    if isinstance(body, dict):
        body = {**body, "stream": stream}
    answer = post(stack.url + path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"].split(".")[0].split("[")[0] == param


@pytest.mark.parametrize("role", ["prompt", "completion"])
def test_services_refuse_bad_bodies_the_same_way(stack: RunningStack, role: str) -> None:
    path = {"prompt": "/v1/prompt", "completion": "/v1/completion"}[role]
    sampling = {"max_tokens": 4}
    base = {"request_id": "r", "handover_id": "h", "prompt_token_ids": [1], "sampling": sampling}
    url = stack.services[role].url + path
    for change, field in (
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids"),
        ({"sampling": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling": {"max_tokens": 10**9}}, "max_tokens"),
        ({"sampling": {}}, "sampling"),
    ):
        body = {**base, **change}
        if role == "completion":
            body["prompt_engine"] = {"engine_id": "x", "epoch": 1, "control_address": "tcp://127.0.0.1:1"}
        answer = post(url, body)
        assert answer.status_code == 400, (change, answer.text)
        assert field in answer.json()["error"]["message"]
