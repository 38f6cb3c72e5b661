"""Objects of the OpenAI API, whole and as stream chunks, as JSON bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from proxy.token_text import TokenText
from wire.json_body import to_json
from wire.services import ErrorBody

Json = dict[str, Any]
Kind = Literal["chat", "text"]

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int

    def as_json(self) -> Json:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished choice."""

    text: str
    finish_reason: str
    logprobs: Sequence[TokenText] | None


class ResponseBuilder:
    """Everything one request's answer consists of; `kind` decides between chat and text completions."""

    def __init__(self, kind: Kind, request_id: str, model: str, created: int) -> None:
        self._is_chat = kind == "chat"
        object_name = "chat.completion" if self._is_chat else "text_completion"
        chunk_name = "chat.completion.chunk" if self._is_chat else "text_completion"
        self.id = ("chatcmpl-" if self._is_chat else "cmpl-") + request_id
        self._head = {"id": self.id, "object": object_name, "created": created, "model": model}
        self._chunk_head = {**self._head, "object": chunk_name}

    def first_chunk(self, index: int, text: str, logprobs: Sequence[TokenText] | None) -> bytes:
        """The chunk that opens a choice: a chat names its role here and nowhere else."""
        if self._is_chat:
            return self._chat_chunk(index, {"role": "assistant", "content": text}, logprobs, None)
        return self.text_chunk(index, text, logprobs)

    def text_chunk(self, index: int, text: str, logprobs: Sequence[TokenText] | None) -> bytes:
        if self._is_chat:
            return self._chat_chunk(index, {"content": text}, logprobs, None)
        return self._chunk(
            [{"index": index, "text": text, "logprobs": text_logprobs(logprobs), "finish_reason": None}]
        )

    def finish_chunk(self, index: int, finish_reason: str) -> bytes:
        if self._is_chat:
            return self._chat_chunk(index, {}, None, finish_reason)
        return self._chunk([{"index": index, "text": "", "logprobs": None, "finish_reason": finish_reason}])

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._chunk([], usage=usage.as_json())

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        build = self._chat_choice if self._is_chat else self._text_choice
        choices = [build(index, answer) for index, answer in enumerate(answers)]
        return to_json({**self._head, "choices": choices, "usage": usage.as_json()})

    def _chat_choice(self, index: int, answer: Answer) -> Json:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
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
        self, index: int, delta: Json, logprobs: Sequence[TokenText] | None, finish_reason: str | None
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": chat_logprobs(logprobs),
            "finish_reason": finish_reason,
        }
        return self._chunk([choice])

    def _chunk(self, choices: list[Json], **more: Json) -> bytes:
        return frame(to_json({**self._chunk_head, "choices": choices, **more}))


def frame(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


def error_frame(error: ErrorBody) -> bytes:
    return frame(to_json(error))


def chat_logprobs(tokens: Sequence[TokenText] | None) -> Json | None:
    if tokens is None:
        return None
    return {"content": [_chat_token(token) for token in tokens], "refusal": None}


def _chat_token(token: TokenText) -> Json:
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


def _top_by_text(token: TokenText) -> Mapping[str, float]:
    """Alternatives and the token itself; of two spelled alike the likelier one stays."""
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
