"""The output of one response: items in the order in which the model writes them, and their events."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from proxy.message_delta import MessageDelta, ToolCallDelta
from proxy.openai_responses import chat_token
from proxy.token_text import TokenText

Json = dict[str, Any]
Event = tuple[str, Json]
"""Its type, and its fields without the sequence number."""
Status = Literal["in_progress", "completed", "incomplete"]


class Item(Protocol):
    """One item while it is being written."""

    def as_json(self, status: Status) -> Json: ...

    def opened(self, position: Json) -> list[Event]:
        """What follows the event that adds the item."""
        ...

    def closed(self, position: Json) -> list[Event]:
        """What comes before the event that ends the item."""
        ...


@dataclass(slots=True)
class MessageItem:
    item_id: str
    text: str = ""
    logprobs: list[Json] = field(default_factory=list)

    def as_json(self, status: Status) -> Json:
        content = [] if status == "in_progress" else [self._part()]
        return {
            "id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content,
        }  # fmt: skip

    def _part(self) -> Json:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def opened(self, position: Json) -> list[Event]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [("response.content_part.added", {**position, "content_index": 0, "part": part})]

    def added(self, position: Json, text: str, logprobs: list[Json]) -> Event:
        self.text += text
        self.logprobs += logprobs
        fields = {**position, "content_index": 0, "delta": text, "logprobs": logprobs}
        return "response.output_text.delta", fields

    def closed(self, position: Json) -> list[Event]:
        place = {**position, "content_index": 0}
        return [
            ("response.output_text.done", {**place, "text": self.text, "logprobs": self.logprobs}),
            ("response.content_part.done", {**place, "part": self._part()}),
        ]


@dataclass(slots=True)
class ReasoningItem:
    item_id: str
    text: str = ""

    def as_json(self, status: Status) -> Json:
        content = [] if status == "in_progress" else [{"type": "reasoning_text", "text": self.text}]
        return {
            "id": self.item_id, "type": "reasoning", "status": status, "summary": [], "content": content,
        }  # fmt: skip

    def opened(self, position: Json) -> list[Event]:
        part = {"type": "reasoning_text", "text": ""}
        return [("response.content_part.added", {**position, "content_index": 0, "part": part})]

    def added(self, position: Json, text: str) -> Event:
        self.text += text
        return "response.reasoning_text.delta", {**position, "content_index": 0, "delta": text}

    def closed(self, position: Json) -> list[Event]:
        place = {**position, "content_index": 0}
        part = {"type": "reasoning_text", "text": self.text}
        return [
            ("response.reasoning_text.done", {**place, "text": self.text}),
            ("response.content_part.done", {**place, "part": part}),
        ]


@dataclass(slots=True)
class CallItem:
    item_id: str
    call_id: str
    name: str
    arguments: str = ""

    def as_json(self, status: Status) -> Json:
        return {
            "id": self.item_id,
            "type": "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments,
        }

    def opened(self, position: Json) -> list[Event]:
        return []

    def added(self, position: Json, text: str) -> Event:
        self.arguments += text
        return "response.function_call_arguments.delta", {**position, "delta": text}

    def closed(self, position: Json) -> list[Event]:
        fields = {**position, "name": self.name, "arguments": self.arguments}
        return [("response.function_call_arguments.done", fields)]


class OutputItems:
    """Fed with the deltas of the answer; only the last item can be open."""

    def __init__(self, *, with_logprobs: bool) -> None:
        self._with_logprobs = with_logprobs
        self._closed: list[Json] = []
        self._open: MessageItem | ReasoningItem | CallItem | None = None
        self._held_logprobs: list[Json] = []
        """Of tokens that have brought no text yet."""

    def push(self, delta: MessageDelta) -> list[Event]:
        events: list[Event] = []
        if delta.reasoning:
            events += self._add_reasoning(delta.reasoning)
        self._hold_logprobs(delta.logprobs)
        rest = list(delta.tool_calls)
        while rest and rest[0].call_id is None:  # more of the open call, which text of the same delta follows
            events += self._add_call(rest.pop(0))
        if delta.content:
            events += self._add_text(delta.content)
        for call in rest:
            events += self._add_call(call)
        return events

    def close(self, status: Status) -> list[Event]:
        """End the item that is open; an answer without any is an empty message."""
        events = [] if self._open or self._closed else self._begin(MessageItem(_new_id("msg")))
        if isinstance(self._open, MessageItem):
            self._open.logprobs += self._held_logprobs
        return events + self._close_open(status)

    def as_json(self) -> list[Json]:
        return [*self._closed, *([] if self._open is None else [self._open.as_json("incomplete")])]

    @property
    def _position(self) -> Json:
        assert self._open is not None
        return {"item_id": self._open.item_id, "output_index": len(self._closed)}

    def _hold_logprobs(self, logprobs: Sequence[TokenText]) -> None:
        if self._with_logprobs:
            self._held_logprobs += [chat_token(token) for token in logprobs]

    def _add_text(self, text: str) -> list[Event]:
        events = [] if isinstance(self._open, MessageItem) else self._begin(MessageItem(_new_id("msg")))
        assert isinstance(self._open, MessageItem)
        logprobs, self._held_logprobs = self._held_logprobs, []
        return [*events, self._open.added(self._position, text, logprobs)]

    def _add_reasoning(self, text: str) -> list[Event]:
        events = [] if isinstance(self._open, ReasoningItem) else self._begin(ReasoningItem(_new_id("rs")))
        assert isinstance(self._open, ReasoningItem)
        return [*events, self._open.added(self._position, text)]

    def _add_call(self, delta: ToolCallDelta) -> list[Event]:
        events: list[Event] = []
        if delta.call_id is not None and delta.name is not None:
            events += self._begin(CallItem(_new_id("fc"), delta.call_id, delta.name))
        assert isinstance(self._open, CallItem)
        if delta.arguments:
            events.append(self._open.added(self._position, delta.arguments))
        return events

    def _begin(self, item: MessageItem | ReasoningItem | CallItem) -> list[Event]:
        events = self._close_open("completed")
        self._open = item
        added = {"output_index": len(self._closed), "item": item.as_json("in_progress")}
        return [*events, ("response.output_item.added", added), *item.opened(self._position)]

    def _close_open(self, status: Status) -> list[Event]:
        item = self._open
        if item is None:
            return []
        events = item.closed(self._position)
        finished = item.as_json(status)
        done = {"output_index": len(self._closed), "item": finished}
        self._closed.append(finished)
        self._open = None
        return [*events, ("response.output_item.done", done)]


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
