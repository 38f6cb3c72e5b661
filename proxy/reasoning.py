"""Takes what a model thinks between <think> and </think> out of its answer, while it is being written."""

from dataclasses import dataclass

from proxy.tags import find_tag

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class SplitText:
    reasoning: str = ""
    content: str = ""


class ReasoningSplitter:
    """One choice's text; thinking comes first, if at all, and ends once.

    White space at the beginning of either part is dropped.
    """

    def __init__(self, *, is_open: bool) -> None:
        """`is_open`: the prompt has opened the thinking already."""
        self.is_thinking = is_open
        self._may_begin = not is_open
        self._held = ""
        self._drops_space = True

    @property
    def is_over(self) -> bool:
        """Nothing but content can follow."""
        return not (self.is_thinking or self._may_begin)

    def push(self, text: str) -> SplitText:
        held, self._held = self._held + text, ""
        if self._may_begin:
            held = self._look_for_begin(held)
        if not self.is_thinking:
            return SplitText(content=self._stripped(held) if not self._may_begin else "")
        search = find_tag(held, (CLOSE,))
        reasoning = self._stripped(search.before)
        if search.tag is None:
            self._held = search.rest
            return SplitText(reasoning)
        self.is_thinking = False
        self._drops_space = True
        return SplitText(reasoning, self._stripped(search.rest))

    def flush(self) -> SplitText:
        held, self._held = self._held, ""
        self._may_begin = False
        return SplitText(held, "") if self.is_thinking else SplitText("", held)

    def _look_for_begin(self, text: str) -> str:
        """Thinking begins with the first thing that is no space, or never."""
        begin = text.lstrip()
        if begin.startswith(OPEN):
            self.is_thinking, self._may_begin = True, False
            return begin[len(OPEN) :]
        if OPEN.startswith(begin):
            self._held = text
            return ""
        self._may_begin = False
        self._drops_space = False
        return text

    def _stripped(self, text: str) -> str:
        if self._drops_space:
            text = text.lstrip()
        if text:
            self._drops_space = False
        return text
