"""The text side of one model: its template, tokenizer and vocabulary."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tokenizers import Tokenizer

from model_files.interface import ModelFiles
from proxy import reasoning
from proxy.chat_messages import TemplateMessage
from proxy.chat_template import ChatTemplate
from proxy.detokenizer import Vocabulary
from proxy.errors import BadRequest, ContextExceeded
from proxy.tools.choice import ToolUse
from proxy.tools.formats import tool_format_of, visible_tags
from proxy.tools.parsers import ToolFormat
from proxy.tools.rendering import plain_messages

INLINE_CHARS = 1024
"""Texts up to this length (about a millisecond of work) are rendered and tokenized on the event loop."""
MESSAGE_CHARS = 16
"""What a message costs beside its text."""
NUM_THREADS = 2
PROBE_CHARS_PER_TOKEN = 16
"""Ordinary text has about 4 characters a token."""

TokenIds = tuple[int, ...]
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    token_ids: TokenIds
    is_thinking: bool
    """The template has opened the assistant's thinking."""


class TextModel:
    """Turns messages and texts into token ids; `vocabulary` turns ids back.

    A prompt that is surely longer than `max_tokens` raises `ContextExceeded` without being tokenized whole,
    which would take seconds and hundreds of megabytes for a body of a few; shorter ones are not checked here.
    """

    def __init__(
        self,
        *,
        name: str,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        eos_token_ids: Sequence[int] = (),
        tool_format: ToolFormat | None = None,
    ) -> None:
        """`tool_format`: None takes the one that the template uses."""
        self.name = name
        self.tokenizer = tokenizer
        self.template = template
        self.eos_token_ids = frozenset(eos_token_ids)
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.vocabulary = Vocabulary(tokenizer)
        source = None if template is None else template.source
        self.tool_format: ToolFormat = tool_format or tool_format_of(source)
        self.thinks = source is not None and reasoning.OPEN in source
        tags = (*visible_tags(self.tool_format), reasoning.OPEN, reasoning.CLOSE)
        self.visible_tag_ids = self.vocabulary.special_ids_of(tags)
        """Special tokens that the parsers of tool calls and reasoning look for."""
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")

    @classmethod
    def from_files(cls, files: ModelFiles, tool_format: ToolFormat | None = None) -> "TextModel":
        template = files.chat_template()
        config = files.config()
        model = cls(
            name=files.name,
            tokenizer=files.tokenizer(),
            template=None if template is None else ChatTemplate(template, files.special_tokens()),
            eos_token_ids=config.eos_token_ids,
            tool_format=tool_format,
        )
        model.vocab_size = max(model.vocab_size, config.vocab_size)
        return model

    async def chat_prompt(
        self,
        messages: Sequence[TemplateMessage],
        max_tokens: int,
        *,
        tools: ToolUse | None = None,
        variables: Mapping[str, Any] | None = None,
        field: str = "messages",
    ) -> ChatPrompt:
        """`variables`: more of what the template may read; `field`: where the messages came from."""
        if self.template is None:
            raise BadRequest(
                f"the model {self.name} has no chat template; use /v1/completions", param="messages"
            )
        template = self.template

        def work() -> ChatPrompt:
            text = self._render(template, messages, tools, variables)
            is_thinking = self.thinks and text.rstrip().endswith(reasoning.OPEN)
            return ChatPrompt(self._encode(text, field, max_tokens), is_thinking)

        is_plain = tools is None and not variables
        return await self._run(work, _size(messages) if is_plain else INLINE_CHARS + 1)

    async def text_prompt(self, text: str, max_tokens: int, *, add_special_tokens: bool = True) -> TokenIds:
        if len(text) <= INLINE_CHARS:
            return self._encode(text, "prompt", max_tokens, add_special_tokens=add_special_tokens)
        work = partial(self._encode, text, "prompt", max_tokens, add_special_tokens=add_special_tokens)
        return await self._run(work, len(text))

    async def text_of(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        def work() -> str:
            # Unlike `decode` it lets other threads run.
            (text,) = self.tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
            return text

        return await self._run(work, len(token_ids))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], ResultT], num_chars: int) -> ResultT:
        if num_chars <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _render(
        self,
        template: ChatTemplate,
        messages: Sequence[TemplateMessage],
        tools: ToolUse | None,
        variables: Mapping[str, Any] | None,
    ) -> str:
        if template.takes_tools:
            definitions = None if tools is None else tools.for_template()
            return template.render(messages, definitions, variables)
        return template.render(plain_messages(messages, tools), None, variables)

    def _encode(
        self, text: str, field: str, max_tokens: int, *, add_special_tokens: bool = False
    ) -> TokenIds:
        """A chat template writes its special tokens itself; a plain text gets the tokenizer's own."""
        num_probed = max_tokens * PROBE_CHARS_PER_TOKEN
        if len(text) > num_probed:
            num_tokens = len(self._ids(text[:num_probed], add_special_tokens=False))
            if num_tokens > 2 * max_tokens:
                raise ContextExceeded.of_prompt(field, max_tokens, f"more than {num_tokens // 2}")
        return tuple(self._ids(text, add_special_tokens=add_special_tokens))

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Unlike `encode`, which keeps every thread waiting for a long text, a batch lets them run."""
        if len(text) <= INLINE_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids


def _size(messages: Sequence[TemplateMessage]) -> int:
    """About the characters that are rendered; calls and their arguments are not looked into."""
    if any("tool_calls" in message for message in messages):
        return INLINE_CHARS + 1
    return sum(
        MESSAGE_CHARS + sum(len(text) for text in message.values() if isinstance(text, str))
        for message in messages
    )
