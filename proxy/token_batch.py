"""What flows from the legs of a request to whoever turns tokens into text."""

from typing import Protocol

import msgspec

from proxy.text_stream import EndOfText
from wire.services import OutputToken, PromptLogprobs


class TokenBatch(msgspec.Struct, frozen=True):
    """Tokens of one choice that arrived together; the last batch of a choice has a `finish_reason`."""

    tokens: tuple[OutputToken, ...]
    finish_reason: EndOfText | None = None
    num_cached_tokens: int | None = None
    """Known with the first batch."""
    prompt_logprobs: PromptLogprobs | None = None
    """With output token 0, where they were asked for."""

    def followed_by(self, later: "TokenBatch") -> "TokenBatch":
        cached = self.num_cached_tokens if later.num_cached_tokens is None else later.num_cached_tokens
        return TokenBatch(
            self.tokens + later.tokens,
            self.finish_reason or later.finish_reason,
            cached,
            self.prompt_logprobs,
        )


class TokenSink(Protocol):
    def accept(self, batch: TokenBatch) -> bool:
        """Take the batch, at once; False when the answer is complete and generation should stop."""
        ...
