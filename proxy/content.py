"""Texts as clients send them: a string, or a list of content parts."""

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from proxy.body_parsing import Strict

CHAT_PARTS = ("text", "refusal")
RESPONSES_PARTS = ("input_text", "output_text", "refusal")


class ChatTextPart(Strict):
    type: Literal["text"]
    text: str


class ResponsesTextPart(Strict):
    type: Literal["input_text", "output_text"]
    text: str


class RefusalPart(Strict):
    type: Literal["refusal"]
    refusal: str


def join_text_parts(value: object, kinds: Collection[str]) -> object:
    """`"text"` as it is; `[{"type": "text", "text": ...}, ...]` as its texts, one a line."""
    if not isinstance(value, list):
        return value
    return "\n".join(_text_of(part, kinds) for part in value)


def _text_of(part: object, kinds: Collection[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in kinds:
        raise PydanticCustomError(
            "unsupported",
            "content parts must be of type {known}, got {kind}",
            {"known": " or ".join(repr(known) for known in kinds if known != "refusal"), "kind": repr(kind)},
        )
    assert isinstance(part, dict)
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise PydanticCustomError(
            "string_type", "a content part of type {kind} needs a string", {"kind": repr(kind)}
        )
    return text


ChatContent = Annotated[
    str,
    BeforeValidator(
        lambda value: join_text_parts(value, CHAT_PARTS),
        json_schema_input_type=str | list[ChatTextPart | RefusalPart],
    ),
]
ResponsesContent = Annotated[
    str,
    BeforeValidator(
        lambda value: join_text_parts(value, RESPONSES_PARTS),
        json_schema_input_type=str | list[ResponsesTextPart | RefusalPart],
    ),
]
