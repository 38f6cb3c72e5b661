"""The tokenizer built from a GGUF's tables, against a plain reading of the same tables."""

import gzip
import json
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from model_files import EMBEDDED_MODEL, ModelFilesError, resolve_model
from model_files.fields import Fields
from model_files.gguf_file import GgufFile
from model_files.resolve import _embedded_path
from tests.model_files.builders import write_gguf

PROMPTS = Path(__file__).parents[1] / "data" / "prompts" / "forty_prompts.jsonl.gz"
GPT2_WORDS = regex.compile(
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", regex.VERSION1
)
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return resolve_model(EMBEDDED_MODEL).tokenizer()


@cache
def embedded_fields() -> Fields:
    return GgufFile(_embedded_path()).fields


@cache
def merge_ranks() -> dict[tuple[str, str], int]:
    merges = embedded_fields().texts("tokenizer.ggml.merges")
    return {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}


@cache
def byte_letters() -> dict[int, str]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others come after code point 255."""
    others = [byte for byte in range(256) if byte not in PRINTABLE]
    return {byte: chr(byte) for byte in PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def plain_tokens(text: str) -> list[str]:
    """SmolLM2's tokens of a text without special tokens: digits alone, GPT-2's words, merges by rank."""
    return [
        token for piece in digit_pieces(text) for word in GPT2_WORDS.findall(piece) for token in merged(word)
    ]


def digit_pieces(text: str) -> Iterator[str]:
    return (match.group() for match in regex.finditer(r"\p{N}|\P{N}+", text))


def merged(word: str) -> list[str]:
    parts = [byte_letters()[byte] for byte in word.encode()]
    ranks = merge_ranks()
    while len(parts) > 1:
        rank, at = min((ranks.get(pair, len(ranks)), i) for i, pair in enumerate(pairwise(parts)))
        if rank == len(ranks):
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def prompt_texts() -> list[str]:
    with gzip.open(PROMPTS, "rt", encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def test_prompts_of_many_kinds_and_languages_split_as_the_tables_say(tokenizer: Tokenizer) -> None:
    for text in prompt_texts():
        assert tokenizer.encode(text, add_special_tokens=False).tokens == plain_tokens(text)


@settings(max_examples=300)
@given(st.text(st.sampled_from(" \n\t'sdtm019²٣Ⅻabé你👍.,!-_\u00a0\u200d"), max_size=30))
def test_awkward_texts_split_as_the_tables_say(tokenizer: Tokenizer, text: str) -> None:
    encoded = tokenizer.encode(text, add_special_tokens=False)
    assert encoded.tokens == plain_tokens(text)
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("in 2024!").tokens == ["in", "Ġ", "2", "0", "2", "4", "!"]


def test_special_tokens_are_one_id_each_and_nothing_is_put_in_front(tokenizer: Tokenizer) -> None:
    encoded = tokenizer.encode("<|im_start|>user\nHi<|im_end|>")
    assert encoded.tokens == ["<|im_start|>", "user", "Ċ", "Hi", "<|im_end|>"]
    assert encoded.ids[0] == 1
    assert encoded.ids[-1] == 2
    assert tokenizer.decode(encoded.ids) == "user\nHi"


def test_ids_are_the_positions_in_the_table(tokenizer: Tokenizer) -> None:
    tokens = embedded_fields().texts("tokenizer.ggml.tokens")
    assert tokenizer.get_vocab_size() == len(tokens) == 49152
    assert [tokenizer.id_to_token(i) for i in range(len(tokens))] == tokens


def test_llama3_keeps_three_digits_together_and_puts_its_bos_in_front(tmp_path: Path) -> None:
    tokenizer = resolve_model(str(write_gguf(tmp_path / "m.gguf", pre="llama-bpe"))).tokenizer()
    words = tokenizer.pre_tokenizer.pre_tokenize_str("ab 12345")
    assert [word for word, _ in words] == ["ab", "Ġ", "123", "45"]
    assert tokenizer.encode("abc").tokens == ["<|start|>", "abc"]


@pytest.mark.parametrize(
    ("pre", "digits"), [("qwen2", ["1", "2", "3"]), ("gpt-2", ["Ġ123"]), ("default", ["Ġ123"])]
)
def test_pre_tokenizers_differ_in_their_digits(tmp_path: Path, pre: str, digits: list[str]) -> None:
    tokenizer = resolve_model(str(write_gguf(tmp_path / "m.gguf", pre=pre))).tokenizer()
    words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("ab 123")]
    assert words[-len(digits) :] == digits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pre": "tekken"},
            "pre-tokenizer 'tekken' is not supported; use this model as a Hugging Face directory",
        ),
        ({"tokenizer_model": "llama"}, "tokenizer 'llama' is not supported, only byte-level BPE"),
    ],
)
def test_unsupported_tokenizers_are_refused_by_name(
    tmp_path: Path, options: dict[str, str], message: str
) -> None:
    files = resolve_model(str(write_gguf(tmp_path / "m.gguf", **options)))
    with pytest.raises(ModelFilesError, match=message):
        files.tokenizer()
