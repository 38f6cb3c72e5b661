"""What flows from the legs of a request to whoever turns tokens into text."""

from typing import Protocol

import msgspec

from proxy.native.loading import PlainStream
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

    def begin_plain(self, choice: int, next_index: int) -> PlainStream | None:
        """What can take the tokens from `next_index` on in its place, of the choice with this number.

        None while they may be more than text. It gets no token until `end_plain`.
        """
        ...

    def end_plain(self, plain: PlainStream) -> None:
        """Goes on behind the tokens that `plain` has taken."""
        ...
