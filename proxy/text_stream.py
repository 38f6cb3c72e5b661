"""Turns one choice's tokens into text: detokenization, stop strings, and the logprobs that go with them."""

from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

from proxy.detokenizer import Vocabulary
from proxy.native.loading import Words
from proxy.stop_strings import NO_STOPS, StopStrings
from proxy.token_text import TokenText, token_text
from wire.services import OutputToken

EndOfText = Literal["stop", "length"]


class TextDelta(msgspec.Struct, frozen=True):
    """What a batch of tokens adds to the answer; `finish_reason` is set once, in the last one."""

    text: str
    logprobs: tuple[TokenText, ...]
    finish_reason: EndOfText | None


class TextStream:
    """The text of one choice; fed with tokens in order until a delta has a `finish_reason`."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        stops: Sequence[str] = (),
        end_token_ids: Collection[int] = (),
        visible_ids: frozenset[int] = frozenset(),
        with_logprobs: bool = False,
        num_chars_before: int = 0,
    ) -> None:
        """`end_token_ids` end an answer and are no part of its text; `visible_ids` are, special or not.

        `num_chars_before`: of an echoed prompt, from whose beginning offsets count.
        """
        self._vocabulary = vocabulary
        self._detokenizer = vocabulary.detokenizer(visible_ids)
        self._stops = StopStrings(stops) if stops else NO_STOPS
        self._end_token_ids = end_token_ids
        self._with_logprobs = with_logprobs
        self._held: list[TokenText] = []
        self._num_chars_read = num_chars_before
        self._num_chars_out = num_chars_before
        self.num_tokens = 0
        """Tokens that made this answer, those of the stop string and the end token included."""

    @property
    def is_text_only(self) -> bool:
        """Nothing but text comes of tokens: no stop string ends the answer, and no logprobs are wanted."""
        return self._stops.is_empty and not self._with_logprobs

    def push_text(self, tokens: Sequence[OutputToken]) -> str:
        """The text alone, of tokens that are not the last; only where `is_text_only`."""
        num_tokens, push = len(tokens), self._detokenizer.push
        self.num_tokens += num_tokens
        if num_tokens == 1:
            return push(tokens[0].token_id)
        return "".join([push(token.token_id) for token in tokens])

    def words(self) -> Words | None:
        """What makes the same text of the next tokens; None while more than text may come of them."""
        return self._detokenizer.words() if self.is_text_only else None

    def resume(self, num_tokens: int, pending: bytes) -> None:
        """Behind tokens that were made text with `words`; see `Detokenizer.resume`."""
        self.num_tokens += num_tokens
        self._detokenizer.resume(pending)

    def push(self, tokens: Sequence[OutputToken], finish_reason: EndOfText | None) -> TextDelta:
        text, is_end = "", finish_reason is not None
        for position, token in enumerate(tokens):
            self.num_tokens += 1
            is_last = is_end and position == len(tokens) - 1
            if is_last and finish_reason == "stop" and token.token_id in self._end_token_ids:
                break
            text += self._push_token(token)
            if self._stops.found is not None:
                return self._end_at_stop(text)
        if finish_reason is None:
            return TextDelta(text, self._release(text), None)
        text += self._stops.push(self._detokenizer.flush())
        if self._stops.found is not None:
            return self._end_at_stop(text)
        text += self._stops.flush()
        return TextDelta(text, tuple(self._held), finish_reason)

    def _push_token(self, token: OutputToken) -> str:
        if self._with_logprobs and token.logprobs is not None:
            described = token_text(self._vocabulary, token.token_id, self._num_chars_read, token.logprobs)
            self._held.append(described)
        piece = self._detokenizer.push(token.token_id)
        self._num_chars_read += len(piece)
        return self._stops.push(piece)

    def _release(self, text: str) -> tuple[TokenText, ...]:
        """Logprobs of tokens whose text has begun to go out; the rest waits with its text."""
        self._num_chars_out += len(text)
        num_ready = 0
        while num_ready < len(self._held) and self._held[num_ready].text_offset < self._num_chars_out:
            num_ready += 1
        ready, self._held = tuple(self._held[:num_ready]), self._held[num_ready:]
        return ready

    def _end_at_stop(self, text: str) -> TextDelta:
        return TextDelta(text, self._release(text), "stop")
