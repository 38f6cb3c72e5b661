"""Every field that the openai package sends is honoured, refused by name, or ignored on purpose."""

from collections.abc import Mapping
from typing import Any

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as responses_params

from proxy.openai_types import ASKS_FOR_NOTHING, ChatRequest, TextRequest
from proxy.responses_api import body as responses_body
from tests.proxy.builders import MODEL, Answering, pair_stack

CHANGES_NOTHING = {
    "metadata",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    "verbosity",
}
RESPONSES_CHANGES_NOTHING = CHANGES_NOTHING | {
    "access_programs",
    "background_options",
    "image",
    "stream_options",
}
"""Of `stream_options`, only padding against eavesdroppers."""

REFUSED: Mapping[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"},
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "moderation": {"type": "auto"},
    "prediction": {"type": "content", "content": "x"},
    "suffix": "x",
    "web_search_options": {},
    "background": True,
    "context_management": [{"type": "compaction"}],
    "conversation": "conv_1",
    "max_tool_calls": 3,
    "previous_response_id": "resp_1",
    "prompt": {"id": "pmpt_1"},
    "truncation": "auto",
}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
KINDS = {
    "/v1/chat/completions": (chat_params.CompletionCreateParamsBase, ChatRequest, ASKS_FOR_NOTHING, CHAT),
    "/v1/completions": (
        text_params.CompletionCreateParamsBase,
        TextRequest,
        ASKS_FOR_NOTHING,
        {"prompt": "hi"},
    ),
    "/v1/responses": (
        responses_params.ResponseCreateParamsBase,
        responses_body.ResponsesRequest,
        responses_body._ASKS_FOR_NOTHING,
        {"input": "hi"},
    ),
}
EVERY_PATH = pytest.mark.parametrize("path", KINDS)


@EVERY_PATH
def test_no_field_of_the_package_is_unknown(path: str) -> None:
    params, model, refused, _ = KINDS[path]
    nothing = RESPONSES_CHANGES_NOTHING if path == "/v1/responses" else CHANGES_NOTHING
    names = set(params.__annotations__)
    assert names - set(model.model_fields) - set(refused) <= nothing
    assert not nothing & (set(model.model_fields) - {"user", "metadata"})


@EVERY_PATH
async def test_what_cannot_be_honoured_is_refused_by_name(path: str) -> None:
    params, model, refused, needed = KINDS[path]
    answering = Answering("ok")
    names = (set(params.__annotations__) & set(refused)) - set(model.model_fields)
    async with pair_stack(answering.prompt, answering.completion) as running:
        for name in sorted(names):
            body = {"model": MODEL, **needed, name: REFUSED[name]}
            response = await running.client.post(path, json=body)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, name), error
            assert error["code"] == "unsupported_parameter"
        assert not running.engines[0].calls
