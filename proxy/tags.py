"""Looks for tags in text that arrives in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TagSearch:
    """`before` is surely no tag; then comes `tag` and what follows it, or `rest`, which may begin a tag."""

    before: str
    tag: str | None
    rest: str


def find_tag(text: str, tags: Sequence[str]) -> TagSearch:
    """The first of the tags in the text."""
    found = min(((text.find(tag), tag) for tag in tags if tag in text), default=None)
    if found is not None:
        position, tag = found
        return TagSearch(text[:position], tag, text[position + len(tag) :])
    num_held = max((_num_begun(text, tag) for tag in tags), default=0)
    cut = len(text) - num_held
    return TagSearch(text[:cut], None, text[cut:])


def _num_begun(text: str, tag: str) -> int:
    """How many of the text's last characters could begin the tag."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
