"""Routes beside generation: tokens, the version, request ids, and what is not served."""

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.proxy.builders import END_ID, Answering, Stack, ids, pair_stack, stack

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Stack]:
    answering = Answering("ok")
    async with pair_stack(answering.prompt, answering.completion) as running:
        yield running


async def test_tokenize_a_text_and_back(running: Stack) -> None:
    answer = (await running.client.post("/tokenize", json={"prompt": "hü", "return_token_strs": True})).json()
    assert answer == {
        "count": 3, "max_model_len": 256, "tokens": ids("hü"), "token_strs": ["h", "Ã", "¼"],
    }  # fmt: skip
    body = {"model": "tiny", "tokens": [*ids("hü"), END_ID]}
    assert (await running.client.post("/detokenize", json=body)).json() == {"prompt": "hü<|end|>"}


async def test_tokenize_a_chat_as_the_model_gets_it(running: Stack) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = (await running.client.post("/tokenize", json={"messages": messages})).json()
    await running.chat(messages=messages)
    assert tuple(answer["tokens"]) == running.engines[0].calls[-1].prompt_request.prompt_token_ids


async def test_tokenize_needs_no_engine() -> None:
    async with stack() as running:
        answer = await running.client.post("/tokenize", json={"prompt": "x" * 300})
    assert (answer.json()["count"], answer.json()["max_model_len"]) == (300, None)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, 400, "prompt"),
        ("/tokenize", {"prompt": 1}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "x"}, 404, "model"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1, 10**6]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
    ],
)
async def test_bad_bodies_are_refused_by_name(
    running: Stack, path: str, body: Any, status: int, param: str
) -> None:
    response = await running.client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_the_version_is_told(running: Stack) -> None:
    assert list((await running.client.get("/version")).json()) == ["version"]


@pytest.mark.parametrize("path", ["/version", "/v1/models", "/nothing", "/v1/chat/completions"])
async def test_every_answer_has_the_clients_request_id_or_a_fresh_one(running: Stack, path: str) -> None:
    given = await running.client.get(path, headers={"x-request-id": "mine-1"})
    assert given.headers.get_list("x-request-id") == ["mine-1"]
    for bad in ("", "a b", "x" * 129):
        fresh = (await running.client.get(path, headers={"x-request-id": bad})).headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", fresh)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/v1/embeddings", "unsupported_endpoint"),
        ("/v1/images/generations", "unsupported_endpoint"),
        ("/v1/responses/resp_1", "unsupported_endpoint"),
        ("/v1/chat/completions/chatcmpl-1", "unsupported_endpoint"),
        ("/v1/embedding", "unknown_url"),
    ],
)
async def test_endpoints_that_are_not_served_say_so(running: Stack, path: str, code: str) -> None:
    response = await running.client.post(path, json={})
    assert (response.status_code, response.json()["error"]["code"]) == (404, code)


@pytest.mark.parametrize("is_behind_tls", [False, True])
@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("POST", "/v1/chat/completions/", "unsupported_endpoint"),
        ("POST", "/v1/completions/", "unknown_url"),
        ("POST", "/v1/responses/", "unsupported_endpoint"),
        ("POST", "/tokenize/", "unknown_url"),
        ("GET", "/v1/models/", "model_not_found"),
    ],
)
async def test_a_trailing_slash_is_not_found_and_leads_nowhere(
    running: Stack, method: str, path: str, code: str, is_behind_tls: bool
) -> None:
    headers = {"x-forwarded-proto": "https"} if is_behind_tls else {}
    response = await running.client.request(method, path, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (404, code)
    assert "location" not in response.headers
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/chat/completions", "/models"])
async def test_a_wrong_base_url_is_told(path: str) -> None:
    answering = Answering("ok")
    async with pair_stack(answering.prompt, answering.completion) as running:
        response = await running.client.post(path, json={})
    assert response.status_code == 404
    assert response.json()["error"]["message"].endswith("a client's base URL has to end with /v1")
