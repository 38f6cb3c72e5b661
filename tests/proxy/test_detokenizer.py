import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from proxy.detokenizer import Vocabulary
from proxy.text_model import TextModel
from tests.proxy.builders import END_ID, TOKENIZER, ids

TEXTS = [
    "plain words, and more words",
    "emoji 🙂🙃 and a family 👨‍👩‍👧‍👦 in one",
    "שלום עולם — right to left, العربية",
    "漢字かな交じり文と한국어",
    "combining e\u0301 and a\u0308, flags 🇨🇭🇯🇵, skin 👍🏽",
    "\ttabs\n\n\nand   spaces   ",
    "zero\u200dwidth\u200bjoiners",
]


def streamed(vocabulary: Vocabulary, token_ids: list[int]) -> list[str]:
    detokenizer = vocabulary.detokenizer()
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_text_streamed_token_by_token_equals_the_whole(smollm: TextModel, text: str) -> None:
    token_ids = list(smollm.tokenizer.encode(text).ids)
    pieces = streamed(smollm.vocabulary, token_ids)
    assert "".join(pieces) == smollm.tokenizer.decode(token_ids) == text
    assert all("\ufffd" not in piece for piece in pieces)


@given(token_ids=st.lists(st.integers(0, 49151), max_size=30))
def test_arbitrary_ids_stream_to_what_the_tokenizer_decodes(smollm: TextModel, token_ids: list[int]) -> None:
    assert "".join(streamed(smollm.vocabulary, token_ids)) == smollm.tokenizer.decode(token_ids)


@given(token_ids=st.lists(st.integers(0, END_ID), max_size=30))
def test_single_byte_tokens_stream_to_what_the_tokenizer_decodes(token_ids: list[int]) -> None:
    assert "".join(streamed(Vocabulary(TOKENIZER), token_ids)) == TOKENIZER.decode(token_ids)


def test_half_a_character_is_never_emitted() -> None:
    assert streamed(Vocabulary(TOKENIZER), ids("é🙂")) == ["", "é", "", "", "", "🙂", ""]


def test_an_unfinished_character_ends_as_one_replacement() -> None:
    assert streamed(Vocabulary(TOKENIZER), ids("🙂")[:3]) == ["", "", "", "\ufffd"]


def test_special_tokens_have_no_text_but_have_bytes() -> None:
    vocabulary = Vocabulary(TOKENIZER)
    assert streamed(vocabulary, [*ids("a"), END_ID, *ids("b")]) == ["a", "", "b", ""]
    assert vocabulary.token_bytes(END_ID) == b"<|end|>"


def test_an_unknown_id_has_no_text() -> None:
    assert streamed(Vocabulary(TOKENIZER), [10_000]) == ["", ""]


def sentencepiece_tokenizer() -> Tokenizer:
    """The decoder of Llama 2 and Gemma: `▁` for a space, bytes that are no piece as `<0xNN>`."""
    pieces = ["<unk>", "▁Hello", "▁world", "!", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def byte_ids(text: str) -> list[int]:
    return [4 + byte for byte in text.encode()]


@pytest.mark.parametrize(
    "token_ids",
    [[1, 2, 3], [1, *byte_ids("🙂"), 2], [*byte_ids("é"), 1, 1], [1, *byte_ids("🙂")[:2], 3], [2]],
)
def test_a_sentencepiece_decoder_streams_to_what_it_decodes(token_ids: list[int]) -> None:
    tokenizer = sentencepiece_tokenizer()
    assert "".join(streamed(Vocabulary(tokenizer), token_ids)) == tokenizer.decode(token_ids)


def test_bytes_of_sentencepiece_tokens() -> None:
    vocabulary = Vocabulary(sentencepiece_tokenizer())
    assert [vocabulary.token_bytes(token_id) for token_id in (1, 3, 4 + 0xE9)] == [b" Hello", b"!", b"\xe9"]
