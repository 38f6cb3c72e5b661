"""Objects of the OpenAI API, whole and as stream chunks, as JSON bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from proxy.message_delta import FinishReason, MessageDelta, ToolCallDelta
from proxy.token_text import TokenText
from wire.json_body import to_json
from wire.services import ErrorBody

Json = dict[str, Any]
Kind = Literal["chat", "text"]

DONE = b"data: [DONE]\n\n"
TEXT_MARK = "\0text"


class Usage(msgspec.Struct, frozen=True):
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    num_reasoning_tokens: int = 0
    """A part of the completion."""

    def as_json(self) -> Json:
        usage: Json = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
        if self.num_reasoning_tokens:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning_tokens}
        return usage


@dataclass(frozen=True, slots=True)
class ToolCall:
    call_id: str
    name: str
    arguments: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One finished choice."""

    text: str
    finish_reason: FinishReason
    logprobs: Sequence[TokenText] | None = None
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()


class ContentChunks:
    """Stream chunks of one choice that differ in nothing but their text: all else is encoded once."""

    def __init__(self, chunk: bytes) -> None:
        """`chunk`: one whose text is TEXT_MARK."""
        self._before, _, self._after = chunk.rpartition(to_json(TEXT_MARK))

    def chunk(self, text: str) -> bytes:
        return self._before + to_json(text) + self._after

    @property
    def around(self) -> tuple[bytes, bytes]:
        """What is before and behind a text's characters in JSON."""
        return self._before + b'"', b'"' + self._after


class ResponseBuilder:
    """Everything one request's answer consists of; `kind` decides between chat and text completions."""

    def __init__(self, kind: Kind, request_id: str, model: str, created: int) -> None:
        self._is_chat = kind == "chat"
        object_name = "chat.completion" if self._is_chat else "text_completion"
        chunk_name = "chat.completion.chunk" if self._is_chat else "text_completion"
        self.id = ("chatcmpl-" if self._is_chat else "cmpl-") + request_id
        self._head = {"id": self.id, "object": object_name, "created": created, "model": model}
        self._chunk_head = {**self._head, "object": chunk_name}

    def delta_chunk(
        self,
        index: int,
        delta: MessageDelta,
        *,
        is_first: bool,
        with_logprobs: bool,
        usage: Usage | None = None,
    ) -> bytes:
        """What a delta adds, but for its finish reason. A chat names its role in the first chunk only."""
        logprobs = delta.logprobs if with_logprobs else None
        if self._is_chat:
            return self._chat_chunk(index, _chat_delta(delta, is_first), logprobs, None, usage)
        choice = {
            "index": index,
            "text": delta.content,
            "logprobs": text_logprobs(logprobs),
            "finish_reason": None,
        }
        return self._chunk([choice], usage)

    def content_chunks(self, index: int) -> ContentChunks:
        """Of deltas behind the first."""
        delta = MessageDelta(content=TEXT_MARK)
        return ContentChunks(self.delta_chunk(index, delta, is_first=False, with_logprobs=False))

    def finish_chunk(self, index: int, finish_reason: FinishReason, usage: Usage | None = None) -> bytes:
        if self._is_chat:
            return self._chat_chunk(index, {}, None, finish_reason, usage)
        choice = {"index": index, "text": "", "logprobs": None, "finish_reason": finish_reason}
        return self._chunk([choice], usage)

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._chunk([], usage)

    def whole(self, answers: Sequence[Answer], usage: Usage, extras: Mapping[str, Any]) -> bytes:
        """`extras`: fields beside those of the API."""
        build = self._chat_choice if self._is_chat else self._text_choice
        choices = [build(index, answer) for index, answer in enumerate(answers)]
        return to_json({**self._head, "choices": choices, "usage": usage.as_json(), **extras})

    def _chat_choice(self, index: int, answer: Answer) -> Json:
        is_only_calls = bool(answer.tool_calls) and not answer.text
        message: Json = {
            "role": "assistant",
            "content": None if is_only_calls else answer.text,
            "refusal": None,
        }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = [_whole_call(call) for call in answer.tool_calls]
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(answer.logprobs),
            "finish_reason": answer.finish_reason,
        }

    def _text_choice(self, index: int, answer: Answer) -> Json:
        return {
            "index": index,
            "text": answer.text,
            "logprobs": text_logprobs(answer.logprobs),
            "finish_reason": answer.finish_reason,
        }

    def _chat_chunk(
        self,
        index: int,
        delta: Json,
        logprobs: Sequence[TokenText] | None,
        finish_reason: FinishReason | None,
        usage: Usage | None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": chat_logprobs(logprobs),
            "finish_reason": finish_reason,
        }
        return self._chunk([choice], usage)

    def _chunk(self, choices: list[Json], usage: Usage | None) -> bytes:
        more = {} if usage is None else {"usage": usage.as_json()}
        return frame(to_json({**self._chunk_head, "choices": choices, **more}))


def _chat_delta(delta: MessageDelta, is_first: bool) -> Json:
    message: Json = {"role": "assistant", "content": delta.content} if is_first else {}
    if delta.content:
        message["content"] = delta.content
    if delta.reasoning:
        message["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        message["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
    # Chunks that only bring logprobs have a content, too: some clients drop chunks without one.
    return message or {"content": ""}


def _call_delta(call: ToolCallDelta) -> Json:
    if call.call_id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.call_id, "type": "function", "function": function}


def _whole_call(call: ToolCall) -> Json:
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def frame(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


def error_frame(error: ErrorBody) -> bytes:
    return frame(to_json(error))


def chat_logprobs(tokens: Sequence[TokenText] | None) -> Json | None:
    if tokens is None:
        return None
    return {"content": [chat_token(token) for token in tokens], "refusal": None}


def chat_token(token: TokenText) -> Json:
    top = [{"token": _readable(data), "logprob": logprob, "bytes": list(data)} for data, logprob in token.top]
    own: Json = {"token": _readable(token.data), "logprob": token.logprob, "bytes": list(token.data)}
    return {**own, "top_logprobs": top}


def text_logprobs(tokens: Sequence[TokenText] | None) -> Json | None:
    if tokens is None:
        return None
    return {
        "tokens": [_readable(token.data) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_top_by_text(token) for token in tokens],
        "text_offset": [token.text_offset for token in tokens],
    }


def _top_by_text(token: TokenText) -> Mapping[str, float] | None:
    """Alternatives and the token itself; of two spelled alike the likelier one stays."""
    if token.logprob is None:
        return None
    by_text: dict[str, float] = {}
    for data, logprob in (*token.top, (token.data, token.logprob)):
        text = _readable(data)
        by_text[text] = max(logprob, by_text.get(text, logprob))
    return by_text


def _readable(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def model_list(model: str, created: int) -> bytes:
    return to_json({"object": "list", "data": [model_object(model, created)]})


def model_object(model: str, created: int) -> Json:
    return {"id": model, "object": "model", "created": created, "owned_by": "tandem"}
