"""The messages of a chat, validated, and in the form that chat templates read."""

from collections.abc import Mapping
from typing import Any, Literal, Self

import msgspec
from pydantic import model_validator
from pydantic_core import PydanticCustomError

from proxy.body_parsing import Strict
from proxy.content import ChatContent
from proxy.errors import BadRequest
from proxy.tools.definitions import ToolCall

TemplateMessage = Mapping[str, Any]
"""`role` and `content`, perhaps `name`, `tool_calls`, `tool_call_id`, `reasoning_content`."""


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: ChatContent | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    """Only in messages of the assistant."""
    tool_call_id: str | None = None
    """Of a message of a tool: the call that it answers."""
    reasoning_content: str | None = None
    refusal: str | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_served(self) -> Self:
        if self.role == "function" or self.function_call is not None:
            raise PydanticCustomError(
                "unsupported", "functions are not supported; use tools", {"field": "function_call"}
            )
        if self.audio is not None:
            raise PydanticCustomError("unsupported", "audio is not supported", {"field": "audio"})
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError(
                "invalid", "only the assistant makes tool calls", {"field": "tool_calls"}
            )
        if self.role == "tool" and self.tool_call_id is None:
            raise PydanticCustomError("missing", "a tool's message needs it", {"field": "tool_call_id"})
        if self.content is None and not self.tool_calls and self.refusal is None:
            raise PydanticCustomError("missing", "a message needs it", {"field": "content"})
        return self

    def for_template(self, field: str = "messages") -> TemplateMessage:
        """`field`: where the message came from."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content or self.refusal or ""}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["tool_calls"] = [_call_for_template(call, field) for call in self.tool_calls]
        return message


def _call_for_template(call: ToolCall, field: str) -> dict[str, Any]:
    """Templates write arguments as JSON themselves, so they get the object."""
    function = {"name": call.function.name, "arguments": _parsed(call.function.arguments, field)}
    return {"id": call.id, "type": "function", "function": function}


def _parsed(arguments: str, field: str) -> object:
    """What is no JSON, perhaps for half a surrogate pair in it, stays the text that it is."""
    try:
        return msgspec.json.decode(arguments) if arguments.strip() else {}
    except msgspec.DecodeError:
        return arguments
    except RecursionError:
        raise BadRequest(
            f"{field}: the arguments of a tool call are nested too deeply", param=field, code="invalid_value"
        ) from None
