"""Typed look-ups in a mapping that came out of a file, with errors that name the file and the key."""

from collections.abc import Mapping

from model_files.errors import ModelFilesError


class Fields:
    """Values by key. A getter without `default` requires the key; `ModelFilesError` names a bad value.

    A stored null counts as absent.
    """

    def __init__(self, source: str, values: Mapping[str, object]) -> None:
        self.source = source
        self.values = values

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def raw(self, key: str) -> object:
        return self.values.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "an integer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number", value)
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a text", value)
        return value

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if key in self else None

    def optional_text(self, key: str) -> str | None:
        return self.text(key) if key in self else None

    def texts(self, key: str) -> list[str]:
        value = self._value(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of texts", value)
        return value

    def integers(self, key: str) -> list[int]:
        """A list of integers; a single integer counts as a list of one."""
        value = self._value(key, None)
        items = value if isinstance(value, list) else [value]
        integers = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
        if len(integers) != len(items):
            raise self._wrong(key, "a list of integers", value)
        return integers

    def mapping(self, key: str) -> Mapping[str, object]:
        value = self._value(key, None)
        if not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        return value

    def section(self, key: str) -> "Fields":
        return Fields(f"{self.source}, {key}", self.mapping(key))

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelFilesError(f"{self.source}: {key} is missing; use a complete file of a language model")
        return value

    def _wrong(self, key: str, expected: str, value: object) -> ModelFilesError:
        return ModelFilesError(f"{self.source}: {key} should be {expected}, not {str(value)[:80]!r}")
