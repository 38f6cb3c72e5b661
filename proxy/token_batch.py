"""What flows from the legs of a request to whoever turns tokens into text."""

from dataclasses import dataclass
from typing import Protocol

from proxy.text_stream import EndOfText
from wire.services import OutputToken


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Tokens that arrived together; the last batch of a request has a `finish_reason`."""

    tokens: tuple[OutputToken, ...]
    finish_reason: EndOfText | None = None
    num_cached_tokens: int | None = None
    """Known with the first batch."""


class TokenSink(Protocol):
    async def accept(self, batch: TokenBatch) -> bool:
        """Take the batch; False when the answer is complete and generation should stop."""
        ...
