"""Reads one `{"name": ..., "arguments": {...}}` in pieces, and passes its arguments on at once."""

import json
from dataclasses import dataclass
from enum import Enum, auto

NAME_KEY = "name"
ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class _State(Enum):
    OPEN = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    DONE = auto()
    BROKEN = auto()


@dataclass(frozen=True, slots=True)
class Scanned:
    """`name` is set once, before any `arguments`; `num_read` characters of the text belong to the call."""

    name: str | None
    arguments: str
    num_read: int


class CallScanner:
    """Fed until `is_done` or `is_broken`; a call without arguments has `{}`.

    The arguments are the model's own JSON text, or the content of the string that some models put it in.
    """

    def __init__(self) -> None:
        self._state = _State.OPEN
        self._key = ""
        self._value = _Value()
        self._name: str | None = None
        self._held_arguments = ""
        """Arguments that came before the name."""
        self._has_arguments = False
        self._new_name: str | None = None
        self._new_arguments: list[str] = []

    @property
    def is_done(self) -> bool:
        return self._state is _State.DONE

    @property
    def is_broken(self) -> bool:
        """What came is no call."""
        return self._state is _State.BROKEN

    @property
    def is_named(self) -> bool:
        return self._name is not None

    def push(self, text: str) -> Scanned:
        self._new_name, self._new_arguments = None, []
        num_read = 0
        for char in text:
            if self.is_done or self.is_broken:
                break
            self._step(char)
            num_read += 1
        return Scanned(self._new_name, "".join(self._new_arguments), num_read)

    def _step(self, char: str) -> None:
        match self._state:
            case _State.OPEN:
                self._expect(char, {"{": _State.KEY})
            case _State.KEY:
                self._key = ""
                self._expect(char, {",": _State.KEY, '"': _State.IN_KEY, "}": _State.DONE})
                if self.is_done:
                    self._end()
            case _State.IN_KEY:
                if char == '"':
                    self._state = _State.COLON
                else:
                    self._key += char
            case _State.COLON:
                self._expect(char, {":": _State.VALUE})
                self._value = _Value()
            case _State.VALUE:
                self._step_value(char)

    def _expect(self, char: str, next_states: dict[str, _State]) -> None:
        if char not in _SPACE:
            self._state = next_states.get(char, _State.BROKEN)

    def _step_value(self, char: str) -> None:
        value = self._value
        if not value.text and char in _SPACE:
            return
        is_part = value.push(char)
        if is_part and self._key in ARGUMENT_KEYS and not value.is_string:
            self._add_arguments(char)
        if value.is_complete:
            self._state = _State.KEY
            self._take_value()
            if not is_part:  # a number or the like ends where the next thing begins
                self._step(char)

    def _take_value(self) -> None:
        is_name = self._key == NAME_KEY
        if not is_name and not (self._key in ARGUMENT_KEYS and self._value.is_string):
            return
        try:
            value = json.loads(self._value.text)
        except (ValueError, RecursionError):
            self._state = _State.BROKEN
            return
        if is_name:
            self._take_name(value)
        else:
            self._add_arguments(value)

    def _take_name(self, name: object) -> None:
        if not isinstance(name, str) or not name:
            self._state = _State.BROKEN
            return
        self._name = self._new_name = name
        held, self._held_arguments = self._held_arguments, ""
        if held:
            self._new_arguments.append(held)

    def _add_arguments(self, text: str) -> None:
        self._has_arguments = True
        if self._name is None:
            self._held_arguments += text
        else:
            self._new_arguments.append(text)

    def _end(self) -> None:
        if self._name is None:
            self._state = _State.BROKEN
        elif not self._has_arguments:
            self._new_arguments.append("{}")


class ArgumentsScanner:
    """Reads the arguments of a call whose name is known already."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name
        self._value = _Value()

    @property
    def is_done(self) -> bool:
        return self._value.is_complete

    is_broken = False
    is_named = True

    def push(self, text: str) -> Scanned:
        num_read = 0
        while num_read < len(text) and not self._value.is_complete:
            self._value.push(text[num_read])
            num_read += 1
        name, self._name = self._name, None
        return Scanned(name, text[:num_read], num_read)


class _Value:
    """One JSON value, read character by character to its end."""

    def __init__(self) -> None:
        self.text = ""
        self.is_complete = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    @property
    def is_string(self) -> bool:
        return self.text.startswith('"')

    def push(self, char: str) -> bool:
        """False when the value ended before this character."""
        if not self._in_string and self._depth == 0 and self.text and char in ",}" + _SPACE:
            self.is_complete = True
            return False
        self.text += char
        if self._in_string:
            self._step_in_string(char)
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        self.is_complete = not self._in_string and self._depth == 0 and (char in '}]"')
        return True

    def _step_in_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
