"""Requests of every kind, and their answers in a form in which a migrated one equals an undisturbed one."""

import json
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.system.chaos import MODEL, STREAM_TIMEOUT_S
from tests.system.processes import RunningStack, eventually

CITY = {"type": "string", "minLength": 8, "maxLength": 14}
SCHEMA = {
    "type": "object",
    "properties": {"cities": {"type": "array", "items": CITY, "minItems": 6, "maxItems": 6}},
    "required": ["cities"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Name cities of the world."}]
SAMPLED = {"temperature": 1.0, "seed": 7, "top_k": 10}
FORMAT = {"type": "json_schema", "name": "cities", "schema": SCHEMA}
VOLATILE = frozenset({"id", "created", "created_at", "item_id", "response_id", "call_id"})


@dataclass(frozen=True, slots=True)
class Kind:
    path: str
    fields: dict[str, Any]


KINDS: dict[str, Kind] = {
    "structured chat with logprobs": Kind(
        "chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 150,
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 2,
            "response_format": {"type": "json_schema", "json_schema": {"name": "cities", "schema": SCHEMA}},
        },
    ),
    "call of a tool": Kind(
        "chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 150,
            "stream": True,
            "tools": [{"type": "function", "function": {"name": "visit", "parameters": SCHEMA}}],
            "tool_choice": "required",
        },
    ),
    "responses with a schema": Kind(
        "responses",
        {"input": "Name cities.", "max_output_tokens": 150, "stream": True, "text": {"format": FORMAT}},
    ),
    "two choices, not streamed": Kind(
        "chat/completions",
        {"messages": MESSAGES, "max_tokens": 300, "n": 2, "logprobs": True, "ignore_eos": True},
    ),
    "stop string": Kind(
        "completions",
        {
            "prompt": "1, 2, 3, 4, 5, 6, 7,",
            "temperature": 0,
            "max_tokens": 150,
            "stream": True,
            "stop": " 31",
        },
    ),
}


@dataclass(slots=True)
class Answer:
    """What a client got, pieces joined: how many tokens came in one event is chance."""

    num_events: int = 0
    num_migrations: str | None = None
    joined: dict[str, str] = field(default_factory=dict)
    """Texts by place: content, arguments of a call, text of a choice."""
    logprobs: list[tuple[str, float]] = field(default_factory=list)
    rest: list[Any] = field(default_factory=list)
    """Finish reasons and usage."""


class Answers:
    """All kinds at once."""

    def __init__(self, stack: RunningStack, max_tokens: int | None = None) -> None:
        """`max_tokens`: answers shorter than the kinds want them, where just the prompts matter."""
        self._stack = stack
        self._max_tokens = max_tokens
        self._run_id = uuid.uuid4().hex
        self._answers = {name: Answer() for name in KINDS}

    def run(self, during: Callable[[], None] = lambda: None) -> dict[str, Answer]:
        """`during` is called when each has sent a few events, or ended, and the longest is being decoded."""
        with ThreadPoolExecutor(len(KINDS)) as pool:
            running = {name: pool.submit(self._ask, name) for name in KINDS}
            eventually(
                lambda: all(self._has_begun(name) or task.done() for name, task in running.items()),
                "every answer has begun",
                STREAM_TIMEOUT_S,
            )
            during()
            for task in running.values():
                task.result(STREAM_TIMEOUT_S)
        return self._answers

    def _has_begun(self, name: str) -> bool:
        if KINDS[name].fields.get("stream"):
            return self._answers[name].num_events >= 10
        # Nothing of it can be seen here before it ends, so the proxy is asked.
        trace = httpx.get(f"{self._stack.url}/page/requests/{self._request_id(name)}", timeout=30.0).json()
        return bool(trace["state"] == "completion")

    def _request_id(self, name: str) -> str:
        return f"{self._run_id}.{list(KINDS).index(name)}"

    def _ask(self, name: str) -> None:
        kind, answer = KINDS[name], self._answers[name]
        body = {"model": MODEL, **SAMPLED, **kind.fields}
        if self._max_tokens is not None:
            body["max_tokens" if "max_tokens" in body else "max_output_tokens"] = self._max_tokens
        url = f"{self._stack.url}/v1/{kind.path}"
        headers = {"x-request-id": self._request_id(name)}
        with httpx.stream("POST", url, json=body, headers=headers, timeout=STREAM_TIMEOUT_S) as response:
            if not kind.fields.get("stream"):
                assert response.status_code == 200, response.read()
                answer.num_migrations = response.headers["x-tandem-migrations"]
                _take(answer, json.loads(response.read()))
                return
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    _take(answer, json.loads(line.removeprefix("data: ")))
                    answer.num_events += 1


def _take(answer: Answer, event: dict[str, Any]) -> None:
    assert "error" not in event or event["error"] is None, event["error"]
    if event.get("usage"):
        answer.rest.append(_without_volatile(event["usage"]))
    for choice in event.get("choices", ()):
        _take_choice(answer, choice)
    if event.get("type") == "response.output_text.delta":
        _join(answer, "text", event["delta"])
    if event.get("type") == "response.completed":
        answer.rest.append(_without_volatile(event["response"]))


def _take_choice(answer: Answer, choice: dict[str, Any]) -> None:
    said = choice.get("delta") or choice.get("message") or choice
    place = choice["index"]
    _join(answer, f"{place} content", said.get("content") or said.get("text") or "")
    for call in said.get("tool_calls") or ():
        function = call["function"]
        _join(answer, f"{place} call {call['index']}", function.get("name") or "")
        _join(answer, f"{place} call {call['index']}", function.get("arguments") or "")
    for entry in (choice.get("logprobs") or {}).get("content") or ():
        answer.logprobs.append((entry["token"], entry["logprob"]))
    if choice.get("finish_reason") is not None:
        answer.rest.append((place, choice["finish_reason"]))


def _join(answer: Answer, place: str, piece: str) -> None:
    answer.joined[place] = answer.joined.get(place, "") + piece


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_volatile(item) for key, item in value.items() if key not in VOLATILE}
    return [_without_volatile(item) for item in value] if isinstance(value, list) else value
