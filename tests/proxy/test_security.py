"""Who is served, what engines are shown, and what no client can do."""

import asyncio
import json
import logging
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import openai
import pytest

from proxy.main import main
from tests.proxy.builders import Answering, Stack, chat_body, pair_stack, stack
from tests.proxy.mock_engines import Call, MockEngine
from tests.proxy.test_openai_client import client_of

PROTECTED = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
]
OPEN = ["/", "/page/status", "/health", "/health/live", "/metrics", "/version", "/openapi.json"]


def keyed_stack(**settings: object) -> AbstractAsyncContextManager[Stack]:
    answering = Answering("ok")
    return pair_stack(answering.prompt, answering.completion, **{"api_keys": "k1, k2", **settings})


async def test_without_a_good_key_nothing_is_served_and_no_engine_hears_of_it() -> None:
    async with keyed_stack() as running:
        for method, path in PROTECTED:
            for headers in ({}, {"authorization": "Bearer k3"}, {"authorization": "Basic k1"}):
                response = await running.client.request(method, path, json=chat_body(), headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
                assert "x-request-id" in response.headers
        for path in OPEN:
            assert (await running.client.get(path)).status_code == 200
        assert [len(engine.calls) for engine in running.engines] == [0, 0]
        assert running.metric("tandem_proxy_refused_keys_total") == len(PROTECTED) * 3


async def test_every_good_key_is_served() -> None:
    async with keyed_stack() as running:
        for key in ("k1", "k2"):
            running.client.headers["authorization"] = f"Bearer {key}"
            assert (await running.chat()).status_code == 200


async def test_clients_of_the_sdk_raise_what_they_should() -> None:
    async with keyed_stack() as running, client_of(running) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])


async def test_a_large_body_without_a_key_gets_its_401() -> None:
    async with keyed_stack() as running:
        response = await running.client.post("/v1/completions", content=b"x" * (4 << 20))
    assert response.status_code == 401


async def test_keys_of_a_file_can_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("settings.secret_keys.CHECK_INTERVAL_S", 0.0)
    file = tmp_path / "keys"
    file.write_text("old")
    async with keyed_stack(api_keys=None, api_keys_file=file) as running:
        running.client.headers["authorization"] = "Bearer new"
        assert (await running.chat()).status_code == 401
        file.write_text("new\n# old\n")
        assert (await running.chat()).status_code == 200


def test_a_key_file_that_cannot_be_read_stops_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--api-keys-file", "/nowhere/keys"]) == 1
    assert "/nowhere/keys" in capsys.readouterr().err


async def test_engines_are_shown_the_service_token_and_no_client_sees_their_401() -> None:
    seen = []

    class Guarded(MockEngine):
        async def __call__(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]
            if scope["type"] == "http":
                seen.append(dict(scope["headers"]).get(b"authorization"))
            await super().__call__(scope, receive, send)

    async def refuse(call: Call) -> None:
        await call.refuse(401, "no service token", kind="invalid_request_error", code="invalid_service_token")

    answering = Answering("ok")
    engines = Guarded("prompt", answering.prompt), Guarded("completion", answering.completion)
    async with stack(*engines, service_token="secret", max_migrations=0) as running:
        running.client.headers["authorization"] = "Bearer of-the-client"
        assert (await running.chat()).status_code == 200
        assert set(seen) == {b"Bearer secret"}
        engines[0].script = refuse
        response = await running.chat()
    assert (response.status_code, response.json()["error"]["type"]) == (502, "server_error")


async def test_no_prompt_or_answer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    answering = Answering("secret-answer")
    async with pair_stack(answering.prompt, answering.completion) as running:
        await running.chat(messages=[{"role": "user", "content": "secret-question"}])
        await running.chat(messages=[{"role": "secret-role", "content": "secret-question"}])
        await running.complete(prompt="secret-question", stop=["secret-stop"], stream=True)
        await running.client.post("/tokenize", json={"prompt": "secret-question"})
    assert running.engines[0].calls
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("proxy")]
    assert any("status=200" in message for message in ours)
    assert not any("secret-" in message for message in ours)


@pytest.mark.parametrize("path", ["chat", "text"])
async def test_a_client_cannot_choose_an_engine_address(path: str) -> None:
    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        called.append(await reader.read(100))
        writer.close()

    called: list[bytes] = []
    server = await asyncio.start_server(stranger, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    wishes = {
        "prompt_engine": {"engine_id": "x", "epoch": 1, "control_address": f"tcp://{address}"},
        "handover_id": "f" * 32,
        "kv_transfer_params": {"remote_host": "127.0.0.1", "remote_port": int(address.split(":")[1])},
        "prompt_url": f"http://{address}",
    }
    headers = {"x-prefiller-host-port": address, "host": address, "x-forwarded-host": address}
    answering = Answering("ok")
    async with server, pair_stack(answering.prompt, answering.completion) as running:
        running.client.headers.update(headers)
        send = running.chat if path == "chat" else running.complete
        assert (await send(**wishes)).status_code == 200
        prompt, completion = (engine.calls[0] for engine in running.engines)
    told = completion.completion_request
    assert told.prompt_engine is not None
    assert told.prompt_engine.control_address == running.engines[0].info.control_address
    assert told.handover_id == prompt.prompt_request.handover_id != "f" * 32
    assert address not in json.dumps(completion.body.decode())
    assert called == []


PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}


@pytest.mark.parametrize(("origin", "is_allowed"), [("http://mine", True), ("http://other", False)])
async def test_only_pages_of_configured_origins_may_call_from_a_browser(
    origin: str, is_allowed: bool
) -> None:
    answering = Answering("ok")
    settings = {"cors_origins": ("http://mine/",), "api_keys": "secret"}
    async with pair_stack(answering.prompt, answering.completion, **settings) as running:
        url, asked_by = "/v1/chat/completions", {"origin": origin}
        before = await running.client.options(url, headers={**asked_by, **PREFLIGHT})
        assert (before.status_code == 200) == is_allowed
        headers = {**asked_by, "authorization": "Bearer secret"}
        response = await running.client.post(url, json=chat_body(), headers=headers)
        assert response.status_code == 200
        allowed = response.headers.get("access-control-allow-origin")
        assert allowed == (origin if is_allowed else None)


async def test_by_default_no_page_of_another_origin_is_let_in() -> None:
    answering = Answering("ok")
    async with pair_stack(answering.prompt, answering.completion) as running:
        headers = {"origin": "http://mine", **PREFLIGHT}
        assert (await running.client.options("/v1/chat/completions", headers=headers)).status_code == 405
        response = await running.client.post("/v1/chat/completions", json=chat_body(), headers=headers)
    assert "access-control-allow-origin" not in response.headers
