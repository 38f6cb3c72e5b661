"""Finds calls in what a model writes, in the format it was trained on, while it is being written.

    hermes       text <tool_call>{"name": ..., "arguments": {...}}</tool_call> ...     (Hermes, Qwen, SmolLM)
    llama3_json  {"name": ..., "parameters": {...}}; ...   or the same after <|python_tag|>
    mistral      [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]   or   [TOOL_CALLS]name{...}
    forced       what structured output makes of a model: [{"name": ..., "arguments": {...}}, ...]

Text that begins like a call and turns out to be none is content. White space around calls is dropped.
"""

import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal, Protocol

from proxy.message_delta import ToolCallDelta
from proxy.tags import find_tag
from proxy.tools.call_scanner import ArgumentsScanner, CallScanner
from proxy.tools.choice import ToolUse

ToolFormat = Literal["hermes", "llama3_json", "mistral"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGrammar:
    """How a format sets calls apart from text.

    `is_call_first`: a message that begins with `{` is a call; `starts_in_calls`: there is no text at all;
    `names_come_first`: a call may be `name{arguments}`.
    """

    open_tag: str | None = None
    close_tag: str | None = None
    separators: str = ""
    is_call_first: bool = False
    starts_in_calls: bool = False
    names_come_first: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        return () if self.open_tag is None else (self.open_tag,)


GRAMMARS: dict[ToolFormat, CallGrammar] = {
    "hermes": CallGrammar(open_tag="<tool_call>", close_tag="</tool_call>"),
    "llama3_json": CallGrammar(open_tag="<|python_tag|>", separators=";", is_call_first=True),
    "mistral": CallGrammar(open_tag="[TOOL_CALLS]", separators="[,]", names_come_first=True),
}
_FORCED_LIST = CallGrammar(separators="[,]", starts_in_calls=True)
_SPACE = " \t\r\n"
_ARGS_TAG = "[ARGS]"
_NAME = re.compile(r"[\w.:-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Parsed:
    content: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class ToolParser(Protocol):
    @property
    def num_finished(self) -> int:
        """Calls that are complete."""
        ...

    def push(self, text: str) -> Parsed: ...

    def flush(self) -> Parsed:
        """What is still held back, once it is known that nothing follows."""
        ...


def tool_parser(format: ToolFormat, use: ToolUse) -> ToolParser:
    """The parser for one choice of a request with tools."""
    new_id = _mistral_id if format == "mistral" else _openai_id
    if use.named is not None:
        return NamedCallParser(use.named, new_id)
    return CallParser(_FORCED_LIST if use.is_required else GRAMMARS[format], new_id)


def _openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    """Mistral's templates take nine letters and digits only."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class NamedCallParser:
    """All the text is the arguments of one call."""

    def __init__(self, name: str, new_id: Callable[[], str]) -> None:
        self._begun: ToolCallDelta | None = ToolCallDelta(0, "", new_id(), name)
        self.num_finished = 0

    def push(self, text: str) -> Parsed:
        if not text:
            return Parsed()
        begun = () if self._begun is None else (self._begun,)
        self._begun = None
        return Parsed("", (*begun, ToolCallDelta(0, text)))

    def flush(self) -> Parsed:
        return Parsed()


class _State(Enum):
    START = auto()
    TEXT = auto()
    BETWEEN_CALLS = auto()
    IN_CALL = auto()


@dataclass(slots=True)
class _Output:
    content: list[str] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)

    def parsed(self) -> Parsed:
        return Parsed("".join(self.content), tuple(self.calls))


class CallParser:
    """Splits one choice's text into content and calls."""

    def __init__(self, grammar: CallGrammar, new_id: Callable[[], str]) -> None:
        self._grammar = grammar
        self._new_id = new_id
        self._state = _State.BETWEEN_CALLS if grammar.starts_in_calls else _State.START
        self._held = ""
        self._opening = ""
        """What stands before a first call: content, should it not become one."""
        self._scanner: CallScanner | ArgumentsScanner = CallScanner()
        self._num_begun = 0
        self.num_finished = 0
        self._drops_space = True

    def push(self, text: str) -> Parsed:
        self._held += text
        out = _Output()
        while self._held and self._step(out):
            pass
        return out.parsed()

    def flush(self) -> Parsed:
        out = _Output()
        if self._state in (_State.BETWEEN_CALLS, _State.IN_CALL):
            self._give_back(out, self._held)
        else:
            self._add_content(out, self._held)
        self._held = ""
        return out.parsed()

    def _step(self, out: _Output) -> bool:
        """Read on; False when more text is needed."""
        match self._state:
            case _State.START:
                return self._step_start()
            case _State.TEXT:
                return self._step_text(out)
            case _State.BETWEEN_CALLS:
                return self._step_between(out)
            case _State.IN_CALL:
                return self._step_call(out)

    def _step_start(self) -> bool:
        if not self._held.strip(_SPACE):
            return False
        is_call = self._grammar.is_call_first and self._held.lstrip(_SPACE).startswith("{")
        self._state = _State.BETWEEN_CALLS if is_call else _State.TEXT
        return True

    def _step_text(self, out: _Output) -> bool:
        search = find_tag(self._held, self._grammar.tags)
        self._add_content(out, search.before)
        self._held = search.rest
        if search.tag is None:
            return False
        self._opening = search.tag
        self._state = _State.BETWEEN_CALLS
        return True

    def _step_between(self, out: _Output) -> bool:
        self._skip(_SPACE)
        rest = self._held
        if not rest:
            return False
        if rest.startswith("{"):
            self._scanner = CallScanner()
            self._state = _State.IN_CALL
        elif self._num_begun and (tag := self._tag_at(rest)) is not None:
            if not rest.startswith(tag):
                return False  # it may become one
            self._take_tag(tag)
        elif rest[0] in self._grammar.separators:
            self._skip(rest[0])
        elif self._grammar.names_come_first and _NAME.match(rest):
            return self._step_name(out)
        else:
            self._give_back(out, "")
        return True

    def _skip(self, chars: str) -> None:
        rest = self._held.lstrip(chars)
        self._opening += self._held[: len(self._held) - len(rest)]
        self._held = rest

    def _tag_at(self, text: str) -> str | None:
        """The tag that stands or begins there."""
        tags = (self._grammar.open_tag, self._grammar.close_tag)
        known = (tag for tag in tags if tag is not None)
        return next((tag for tag in known if text.startswith(tag) or tag.startswith(text)), None)

    def _take_tag(self, tag: str) -> None:
        self._held = self._held[len(tag) :]
        if tag == self._grammar.close_tag:
            self._go_to_text(drops_space=True)
        else:
            self._opening += tag

    def _step_name(self, out: _Output) -> bool:
        """`name{`, with Mistral's `[ARGS]` in between perhaps."""
        name, brace, rest = self._held.partition("{")
        bare = name.strip(_SPACE).removesuffix(_ARGS_TAG)
        if not brace and len(name) <= 128 + len(_ARGS_TAG):
            return False
        if not brace or not _NAME.fullmatch(bare):
            self._give_back(out, "")
            return True
        self._scanner = ArgumentsScanner(bare)
        self._held = brace + rest
        self._state = _State.IN_CALL
        return True

    def _step_call(self, out: _Output) -> bool:
        scanned = self._scanner.push(self._held)
        if not self._scanner.is_named:
            self._opening += self._held[: scanned.num_read]
        self._held = self._held[scanned.num_read :]
        if scanned.name is not None:
            out.calls.append(ToolCallDelta(self._num_begun, "", self._new_id(), scanned.name))
            self._num_begun += 1
            self._opening = ""
        if scanned.arguments:
            out.calls.append(ToolCallDelta(self._num_begun - 1, scanned.arguments))
        if self._scanner.is_done:
            self.num_finished += 1
            self._opening = ""
            self._state = _State.BETWEEN_CALLS
        elif self._scanner.is_broken:
            self._give_back(out, "")
        return True

    def _give_back(self, out: _Output, held: str) -> None:
        """No call after all: what stands before is content, unless a call came of it."""
        given_back = self._opening + held
        if self._num_begun and not given_back.strip(_SPACE + self._grammar.separators):
            given_back = ""  # it was what separates calls
        self._add_content(out, given_back)
        self._go_to_text(drops_space=not given_back)

    def _go_to_text(self, *, drops_space: bool) -> None:
        self._opening = ""
        self._state = _State.TEXT
        self._drops_space = drops_space

    def _add_content(self, out: _Output, text: str) -> None:
        if self._drops_space:
            text = text.lstrip(_SPACE)
        if text:
            self._drops_space = False
            out.content.append(text)
