"""What a batch of tokens adds to one choice, as clients see it: text, reasoning, calls of tools."""

from dataclasses import dataclass
from typing import Literal

import msgspec

from proxy.token_text import TokenText

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """`call_id` and `name` come once, with the call's first delta; `arguments` are pieces of JSON text."""

    index: int
    arguments: str = ""
    call_id: str | None = None
    name: str | None = None


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True):
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: tuple[TokenText, ...] = ()
    finish_reason: FinishReason | None = None

    @property
    def is_plain(self) -> bool:
        """Content, and nothing else."""
        return bool(self.content) and not (self.reasoning or self.tool_calls or self.finish_reason)

    @property
    def has_parts(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls or self.logprobs)
