"""One token as logprobs show it."""

from dataclasses import dataclass

from proxy.detokenizer import Vocabulary
from wire.services import TokenLogprobs


@dataclass(frozen=True, slots=True)
class TokenText:
    data: bytes
    """The bytes the token stands for; half a character has no text."""
    text_offset: int
    """Where the token begins in the answer's text, in characters."""
    logprob: float | None
    """None: nothing comes before it."""
    top: tuple[tuple[bytes, float], ...] = ()


def token_text(
    vocabulary: Vocabulary, token_id: int, text_offset: int, logprobs: TokenLogprobs | None
) -> TokenText:
    bytes_of = vocabulary.token_bytes
    if logprobs is None:
        return TokenText(bytes_of(token_id), text_offset, None)
    top = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=False)
    return TokenText(
        data=bytes_of(token_id),
        text_offset=text_offset,
        logprob=logprobs.logprob,
        top=tuple((bytes_of(top_id), logprob) for top_id, logprob in top),
    )
