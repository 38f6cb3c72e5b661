"""The text side of one model: its template, tokenizer and vocabulary."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tokenizers import Tokenizer

from model_files.interface import ModelFiles
from proxy.chat_template import ChatMessage, ChatTemplate
from proxy.detokenizer import Vocabulary
from proxy.errors import BadRequest, ContextExceeded

INLINE_CHARS = 1024
"""Texts up to this length (about a millisecond of work) are rendered and tokenized on the event loop."""
NUM_THREADS = 2
PROBE_CHARS_PER_TOKEN = 16
"""Ordinary text has about 4 characters a token."""

TokenIds = tuple[int, ...]


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
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.template = template
        self.eos_token_ids = frozenset(eos_token_ids)
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.vocabulary = Vocabulary(tokenizer)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")

    @classmethod
    def from_files(cls, files: ModelFiles) -> "TextModel":
        template = files.chat_template()
        config = files.config()
        model = cls(
            name=files.name,
            tokenizer=files.tokenizer(),
            template=None if template is None else ChatTemplate(template, files.special_tokens()),
            eos_token_ids=config.eos_token_ids,
        )
        model.vocab_size = max(model.vocab_size, config.vocab_size)
        return model

    async def chat_prompt(self, messages: Sequence[ChatMessage], max_tokens: int) -> TokenIds:
        if self.template is None:
            raise BadRequest(
                f"the model {self.name} has no chat template; use /v1/completions", param="messages"
            )
        template = self.template

        def work() -> TokenIds:
            return self._encode(template.render(messages), "messages", max_tokens)

        return await self._run(work, sum(len(message["content"]) for message in messages))

    async def text_prompt(self, text: str, max_tokens: int) -> TokenIds:
        return await self._run(lambda: self._encode(text, "prompt", max_tokens), len(text))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], TokenIds], num_chars: int) -> TokenIds:
        if num_chars <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _encode(self, text: str, field: str, max_tokens: int) -> TokenIds:
        """A chat template writes its special tokens itself; a plain text gets the tokenizer's own."""
        add_special_tokens = field == "prompt"
        num_probed = max_tokens * PROBE_CHARS_PER_TOKEN
        if len(text) > num_probed:
            num_tokens = len(self.tokenizer.encode(text[:num_probed], add_special_tokens=False).ids)
            if num_tokens > 2 * max_tokens:
                raise ContextExceeded.of_prompt(field, max_tokens, f"more than {num_tokens // 2}")
        return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
