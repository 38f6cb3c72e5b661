"""Thoughts and content are told apart whatever pieces the text comes in."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.reasoning import ReasoningSplitter


def split(pieces: list[str], *, is_open: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(is_open=is_open)
    parts = [*(splitter.push(piece) for piece in pieces), splitter.flush()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\na\n</think>\n\nb", False, "a\n", "b"),
        ("\n<think>a</think>b</think>c", False, "a", "b</think>c"),
        (" plain <think>a</think>", False, "", " plain <think>a</think>"),
        ("<think>never ends", False, "never ends", ""),
        ("a</think>b", True, "a", "b"),
        ("<thi", False, "", "<thi"),
        ("", True, "", ""),
        ("no end </thin", True, "no end </thin", ""),
    ],
)  # fmt: skip
def test_texts_whole_and_by_character(text: str, is_open: bool, reasoning: str, content: str) -> None:
    assert split([text], is_open=is_open) == (reasoning, content)
    assert split(list(text), is_open=is_open) == (reasoning, content)


@settings(max_examples=200)
@given(
    pieces=st.lists(
        st.sampled_from(["<think>", "</think>", "<", "th", "ink>", "/", " ", "a", "🙂"]), max_size=8
    ),
    is_open=st.booleans(),
    size=st.integers(1, 4),
)
def test_pieces_make_no_difference(pieces: list[str], is_open: bool, size: int) -> None:
    text = "".join(pieces)
    cut = [text[start : start + size] for start in range(0, len(text), size)]
    assert split(cut, is_open=is_open) == split([text], is_open=is_open)
