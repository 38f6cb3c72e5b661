"""Finds stop strings in text that arrives in pieces of any size.

A match is the one that is complete first, as if the text came character by character, the longest where
two end together; so the result depends on the text alone, never on how tokens cut it. Text is held back
only as far as it could still be the beginning of a stop string.
"""

from collections.abc import Sequence


class StopStrings:
    """One request's stop strings, each followed by a Knuth-Morris-Pratt automaton."""

    def __init__(self, strings: Sequence[str]) -> None:
        """`strings` are not empty; without any, text passes through untouched."""
        assert all(strings)
        self._strings = tuple(strings)
        self._tables = tuple([_failure_table(string) for string in strings])
        self._matched = [0] * len(self._strings)
        self._held = ""
        self.found: str | None = None

    @property
    def is_empty(self) -> bool:
        return not self._strings

    def push(self, text: str) -> str:
        """The text that is surely before any stop string; a match sets `found`, and nothing follows it."""
        if not self._strings:
            return text
        held = self._held + text
        for position in range(len(self._held), len(held)):
            if self._step(held[position]):
                assert self.found is not None
                self._held = ""
                return held[: position + 1 - len(self.found)]
        num_kept = max(self._matched)
        cut = len(held) - num_kept
        self._held = held[cut:]
        return held[:cut]

    def flush(self) -> str:
        """The text still held back, once it is known that nothing follows."""
        text, self._held = self._held, ""
        return text

    def _step(self, char: str) -> bool:
        """Advance every automaton by one character; True when a stop string is complete."""
        for index, string in enumerate(self._strings):
            length, table = self._matched[index], self._tables[index]
            while length and string[length] != char:
                length = table[length - 1]
            if string[length] == char:
                length += 1
            self._matched[index] = length
            is_complete = length == len(string)
            if is_complete and (self.found is None or len(string) > len(self.found)):
                self.found = string
        return self.found is not None


def _failure_table(string: str) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper suffix that is a prefix too."""
    table = [0] * len(string)
    length = 0
    for index in range(1, len(string)):
        while length and string[length] != string[index]:
            length = table[length - 1]
        if string[length] == string[index]:
            length += 1
        table[index] = length
    return tuple(table)


NO_STOPS = StopStrings(())
"""For everybody: nothing is remembered where nothing is looked for."""
