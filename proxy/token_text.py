"""One token as logprobs show it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenText:
    data: bytes
    """The bytes the token stands for; half a character has no text."""
    text_offset: int
    """Where the token begins in the answer's text, in characters."""
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()
