"""The text side of one model: its template, tokenizer and vocabulary."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tokenizers import Tokenizer

from model_files.interface import ModelFiles
from proxy.chat_template import ChatMessage, ChatTemplate
from proxy.detokenizer import Vocabulary
from proxy.errors import BadRequest

INLINE_CHARS = 4096
"""Texts up to this length (about a millisecond of work) are rendered and tokenized on the event loop."""
NUM_THREADS = 2


class TextModel:
    """Turns messages and texts into token ids; `vocabulary` turns ids back."""

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

    async def chat_prompt(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        if self.template is None:
            raise BadRequest(
                f"the model {self.name} has no chat template; use /v1/completions", param="messages"
            )
        template, num_chars = self.template, sum(len(message["content"]) for message in messages)
        if num_chars <= INLINE_CHARS:
            return self._encode(template.render(messages), add_special_tokens=False)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, lambda: self._encode(template.render(messages), add_special_tokens=False)
        )

    async def text_prompt(self, text: str) -> tuple[int, ...]:
        if len(text) <= INLINE_CHARS:
            return self._encode(text, add_special_tokens=True)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: self._encode(text, add_special_tokens=True))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
