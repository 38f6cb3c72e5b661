"""From the text of one choice to its parts: reasoning, content and calls of tools."""

from dataclasses import dataclass

from proxy.message_delta import FinishReason, MessageDelta
from proxy.reasoning import ReasoningSplitter
from proxy.text_stream import TextDelta
from proxy.tools.choice import ToolUse
from proxy.tools.parsers import Parsed, ToolFormat, tool_parser


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForm:
    """What the text of a request's choices can contain.

    `thinks`: the model may think first; `is_thinking`: its prompt makes it.
    """

    tools: ToolUse | None = None
    tool_format: ToolFormat = "hermes"
    thinks: bool = False
    is_thinking: bool = False

    @property
    def has_parts(self) -> bool:
        """Can there be anything but content?"""
        return self.tools is not None or self.thinks

    def parser(self) -> "MessageParser":
        return MessageParser(self)


PLAIN = MessageForm()


class MessageParser:
    """Fed with the deltas of one choice until one has a finish reason."""

    def __init__(self, form: MessageForm) -> None:
        self._splitter = ReasoningSplitter(is_open=form.is_thinking) if form.thinks else None
        self._tools = None if form.tools is None else tool_parser(form.tool_format, form.tools)
        self._only_one_call = form.tools is not None and not form.tools.is_parallel
        self._has_calls = False
        self.is_plain = not form.has_parts
        """All text is content."""

    @property
    def is_thinking(self) -> bool:
        return self._splitter is not None and self._splitter.is_thinking

    @property
    def may_think(self) -> bool:
        """It thinks, or may still begin to."""
        return self._splitter is not None and not self._splitter.is_over

    def push(self, delta: TextDelta) -> MessageDelta:
        if self.is_plain:
            return MessageDelta(
                content=delta.text, logprobs=delta.logprobs, finish_reason=delta.finish_reason
            )
        reasoning, content = self._split(delta)
        parsed = self._parse(content, is_last=delta.finish_reason is not None)
        self._has_calls = self._has_calls or bool(parsed.calls)
        return MessageDelta(
            content=parsed.content,
            reasoning=reasoning,
            tool_calls=parsed.calls,
            logprobs=delta.logprobs,
            finish_reason=self._finish_reason(delta),
        )

    def _split(self, delta: TextDelta) -> tuple[str, str]:
        if self._splitter is None:
            return "", delta.text
        parts = [self._splitter.push(delta.text)]
        if delta.finish_reason is not None:
            parts.append(self._splitter.flush())
        return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)

    def _parse(self, text: str, *, is_last: bool) -> Parsed:
        if self._tools is None:
            return Parsed(text)
        parsed = self._tools.push(text)
        if is_last:
            rest = self._tools.flush()
            parsed = Parsed(parsed.content + rest.content, parsed.calls + rest.calls)
        if self._only_one_call:
            calls = tuple(call for call in parsed.calls if call.index == 0)
            parsed = Parsed(parsed.content, calls)
        return parsed

    def _finish_reason(self, delta: TextDelta) -> FinishReason | None:
        """The only call that is allowed ends the answer."""
        if delta.finish_reason == "length":
            return "length"
        if delta.finish_reason == "stop":
            return "tool_calls" if self._has_calls else "stop"
        is_enough = self._only_one_call and self._tools is not None and self._tools.num_finished > 0
        return "tool_calls" if is_enough else None
