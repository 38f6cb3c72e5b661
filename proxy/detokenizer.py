"""Token ids to text, one token at a time, never emitting half a character.

The pieces of a stream joined equal `Tokenizer.decode(ids, skip_special_tokens=True)` of all its ids.
Byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM) are decoded as bytes, one table look-up a token;
any other decoder goes through `Tokenizer.decode` on a short window.
"""

import codecs
import json
import weakref
from collections.abc import Collection
from typing import Protocol

from tokenizers import Tokenizer

from proxy.native.loading import Words
from wire.json_body import to_json

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """The text of one growing sequence."""

    def push(self, token_id: int) -> str:
        """The text that is certain once this token is known; may be empty."""
        ...

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed."""
        ...

    def words(self) -> Words | None:
        """What turns the next tokens into text just as well; None while that is not so."""
        ...

    def resume(self, pending: bytes) -> None:
        """Others have pushed tokens with `words`; this is left of a character that is not complete."""
        ...


class Vocabulary:
    """What single tokens look like; shared by all requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self.is_byte_level = _is_byte_level(tokenizer)
        self._words: Words | None = None
        self._bytes: dict[int, bytes] = {}
        self._whole: dict[int, str | None] = {}

    def detokenizer(self, visible_ids: frozenset[int] = frozenset()) -> Detokenizer:
        """`visible_ids`: special tokens that are text all the same."""
        hidden_ids = self.special_ids - visible_ids if visible_ids else self.special_ids
        if self.is_byte_level:
            return ByteLevelDetokenizer(self, hidden_ids)
        return WindowDetokenizer(self._tokenizer, self.special_ids - hidden_ids)

    def special_ids_of(self, tokens: Collection[str]) -> frozenset[int]:
        """The ids of those that are special tokens here."""
        found = (self._tokenizer.token_to_id(token) for token in tokens)
        return frozenset(token_id for token_id in found if token_id in self.special_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token stands for, special tokens included; empty for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def whole_text(self, token_id: int) -> str | None:
        """The token's text where its bytes are whole characters; None for parts of characters."""
        try:
            return self._whole[token_id]
        except KeyError:
            text = self._whole[token_id] = _as_text(self.token_bytes(token_id))
            return text

    def words(self) -> Words:
        """The table of compiled streams; special tokens are no text there."""
        if self._words is None:
            vocabulary = weakref.proxy(self)
            size = self._tokenizer.get_vocab_size(with_added_tokens=True)
            self._words = Words(lambda token_id: vocabulary._word(token_id), to_json, size)
        return self._words

    def _word(self, token_id: int) -> tuple[bytes, bytes | None]:
        if token_id in self.special_ids:
            return b"", b'""'
        text = self.whole_text(token_id)
        return self.token_bytes(token_id), None if text is None else to_json(text)

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self.special_ids:
            return token.encode()
        if self.is_byte_level:
            try:
                return bytes(_BYTE_OF_CHAR[char] for char in token)
            except KeyError:  # an added token, spelled as it is
                return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("\u2581", " ").encode()


class ByteLevelDetokenizer:
    """Joins the bytes of tokens and decodes them as UTF-8."""

    def __init__(self, vocabulary: Vocabulary, hidden_ids: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._hidden_ids = hidden_ids
        self._decoder: codecs.IncrementalDecoder | None = None
        """Most texts are of tokens that are whole characters, and need none."""
        self._is_between = True
        """The decoder holds no part of a character."""

    def push(self, token_id: int) -> str:
        if token_id in self._hidden_ids:
            return ""
        if self._is_between:
            text = self._vocabulary.whole_text(token_id)
            if text is not None:
                return text
        decoder = self._used_decoder()
        text = decoder.decode(self._vocabulary.token_bytes(token_id))
        self._is_between = not decoder.getstate()[0]
        return text

    def flush(self) -> str:
        self._is_between = True
        return "" if self._decoder is None else self._decoder.decode(b"", final=True)

    def words(self) -> Words | None:
        is_usual = self._is_between and self._hidden_ids is self._vocabulary.special_ids
        return self._vocabulary.words() if is_usual else None

    def resume(self, pending: bytes) -> None:
        self._is_between = not pending
        if pending or self._decoder is not None:
            self._used_decoder().setstate((pending, 0))

    def _used_decoder(self) -> codecs.IncrementalDecoder:
        if self._decoder is None:
            self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return self._decoder


class WindowDetokenizer:
    """Decodes the ids since the last safe point twice, with and without the newest, and emits the rest."""

    MAX_HELD_TOKENS = 8
    """Longer runs of undecodable bytes are real garbage, not a character on its way (4 bytes at most)."""

    def __init__(self, tokenizer: Tokenizer, visible_ids: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._visible_ids = visible_ids
        self._ids: list[int] = []
        self._num_context = 0
        """Ids at the start of the window whose text is out already; decoders look at their left neighbour."""

    def push(self, token_id: int) -> str:
        if token_id in self._visible_ids:
            return self.flush() + self._tokenizer.decode([token_id], skip_special_tokens=False)
        self._ids.append(token_id)
        return self._advance(is_last=False)

    def flush(self) -> str:
        return self._advance(is_last=True)

    def words(self) -> None:
        """The text of these tokens depends on their neighbours."""

    def resume(self, pending: bytes) -> None:
        raise AssertionError("nobody else knows the text of these tokens")

    def _advance(self, is_last: bool) -> str:
        before = self._tokenizer.decode(self._ids[: self._num_context])
        text = self._tokenizer.decode(self._ids)
        num_held = len(self._ids) - self._num_context
        if text.endswith(REPLACEMENT) and not is_last and num_held < self.MAX_HELD_TOKENS:
            return ""
        if len(text) > len(before):
            self._ids = self._ids[self._num_context :]
            self._num_context = len(self._ids)
        return text[len(before) :]


def _as_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    if tokenizer.decoder is None:
        return False
    return bool(json.loads(tokenizer.decoder.__getstate__()).get("type") == "ByteLevel")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's map of bytes to printable characters: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHAR = _byte_alphabet()
