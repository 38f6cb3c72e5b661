"""Which JSON schemas the grammar library obeys to the letter, and how the others are told to it.

It compiles more than it obeys: a keyword that it does not know, or does not know in this place, is left out
of the grammar without a word. Such schemas are refused here, by name and place, except where a narrower
schema, all of whose instances fit the given one, says the same in words that it knows.
"""

import json
from collections.abc import Callable

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Schema = dict[str, Json]

_OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"),
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties", "unevaluatedProperties",
    ),
}  # fmt: skip
_TYPE_OF = {keyword: kind for kind, keywords in _OF_TYPE.items() for keyword in keywords}
_COMBINING = ("anyOf", "oneOf", "allOf", "$ref", "enum", "const")
_NOTES = frozenset(
    {
        "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples",
        "deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding", "contentSchema",
    }
)  # fmt: skip
_KNOWN = frozenset({"type", *_COMBINING, *_TYPE_OF, *_NOTES})
_FORMATS = frozenset(
    {
        "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
        "uri-reference", "uri-template", "json-pointer", "relative-json-pointer",
    }
)  # fmt: skip
_UNEVALUATED = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}


class UnsupportedSchema(ValueError):
    """A schema that cannot be obeyed; the message names the keyword and its place."""


def narrowed_schema(text: str) -> str:
    """The schema in words that the grammar obeys; `UnsupportedSchema` where there are none."""
    try:
        schema: Json = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnsupportedSchema(f"the schema is not JSON: {error}") from None
    if not isinstance(schema, bool | dict):
        raise UnsupportedSchema(f"a schema is an object, true or false, not {text[:40]!r}")
    return json.dumps(_narrow(schema, "#"))


def _narrow(schema: Json, at: str) -> Json:
    """The schema at a place, and all schemas inside it."""
    _require(isinstance(schema, dict) or schema is True, at, "allows nothing or is no schema")
    if not isinstance(schema, dict):
        return True
    for keyword in schema:
        _require(keyword in _KNOWN, at, f"the keyword {keyword!r} is not supported")
    for rule in _RULES:
        rule(schema, at)
    narrow = {keyword: value for keyword, value in schema.items() if keyword not in _UNEVALUATED}
    if narrow.get("propertyNames") is True:
        del narrow["propertyNames"]
    for keyword, same in _UNEVALUATED.items():  # nothing else evaluates anything: rules see to that
        if keyword in schema:
            narrow.setdefault(same, schema[keyword])
    if "type" not in schema and (kinds := _implied_types(schema)):
        narrow["type"] = list(kinds)
    _name_contents(narrow, at)
    for keyword, value in narrow.items():
        narrow[keyword] = _narrow_value(keyword, value, f"{at}/{keyword}")
    return narrow


def _name_contents(narrow: Schema, at: str) -> None:
    """What a schema counts or requires, it must allow by name: the grammar allows nothing else."""
    if "minItems" in narrow and "prefixItems" not in narrow:
        narrow.setdefault("items", True)
    if "minProperties" in narrow and "properties" not in narrow and "patternProperties" not in narrow:
        narrow.setdefault("additionalProperties", True)
    required, named = narrow.get("required"), narrow.get("properties", {})
    if isinstance(required, list) and isinstance(named, dict):
        other = narrow.get("additionalProperties", True)
        others: Schema = {str(name): other for name in required if name not in named}
        _require(False not in others.values(), at, f"requires {list(others)}, which it does not allow")
        narrow["properties"] = {**named, **others}


def _narrow_value(keyword: str, value: Json, at: str) -> Json:
    match keyword, value:
        case ("anyOf" | "oneOf" | "allOf" | "prefixItems", list()):
            return [_narrow(inner, f"{at}/{i}") for i, inner in enumerate(value)]
        case ("properties" | "patternProperties" | "$defs" | "definitions", dict()):
            return {name: _narrow(inner, f"{at}/{name}") for name, inner in value.items()}
        case ("items" | "additionalProperties" | "propertyNames", dict()):
            return _narrow(value, at)
        case (_, float()) if keyword.startswith(("min", "max")) and value.is_integer():
            return int(value)
    return value


def _implied_types(schema: Schema) -> list[Json]:
    """The types that the schema says something about."""
    return list(dict.fromkeys(_TYPE_OF[keyword] for keyword in schema if keyword in _TYPE_OF))


def _types(schema: Schema) -> list[str]:
    kinds = schema.get("type", [])
    names = kinds if isinstance(kinds, list) else [kinds]
    return ["number" if name == "integer" else str(name) for name in names]


def _has_its_type(schema: Schema, at: str) -> None:
    for kind in _implied_types(schema) if "type" in schema else ():
        _require(kind in _types(schema), at, f"has keywords for the type {kind!r} but not the type")


def _stands_alone(schema: Schema, at: str) -> None:
    """The grammar follows the first of these and ignores what stands beside it."""
    combining = [keyword for keyword in _COMBINING if keyword in schema]
    beside = [keyword for keyword in schema if keyword not in _NOTES and keyword not in combining[:1]]
    if combining and beside:
        is_plain = combining[0] in ("enum", "const") and beside == ["type"]
        _require(is_plain, at, f"{combining[0]!r} beside {beside[0]!r} is not supported")


def _is_one_way(schema: Schema, at: str) -> None:
    all_of, one_of = schema.get("allOf"), schema.get("oneOf")
    if isinstance(all_of, list):
        _require(len(all_of) == 1, at, "'allOf' of several schemas is not supported")
    if isinstance(one_of, list):
        kinds = [_types(s) if isinstance(s, dict) else [] for s in one_of]
        names = [name for types in kinds for name in types]
        is_exclusive = all(kinds) and len(set(names)) == len(names)
        _require(is_exclusive, at, "'oneOf' of schemas that share a type is not supported; use 'anyOf'")


def _patterns_are_alone(schema: Schema, at: str) -> None:
    """A name must obey all patterns that it matches, the grammar makes it obey one."""
    patterns = schema.get("patternProperties", {})
    if patterns and isinstance(patterns, dict):
        is_alone = len(patterns) == 1 and not {"properties", "required"} & schema.keys()
        _require(is_alone, at, "'patternProperties' beside other names is not supported")


def _is_found(schema: Schema, at: str) -> None:
    reference = schema.get("$ref", "#")
    is_local = isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))
    _require(is_local, at, f"the reference {reference!r} does not lead into the schema itself")
    _require(at == "#" or "$id" not in schema, at, "'$id' below the root is not supported")


def _known_format(schema: Schema, at: str) -> None:
    name = schema.get("format")
    _require(name is None or name in _FORMATS, at, f"the format {name!r} is not supported")


_RULES: tuple[Callable[[Schema, str], None], ...] = (
    _has_its_type,
    _stands_alone,
    _is_one_way,
    _patterns_are_alone,
    _is_found,
    _known_format,
)


def _require(holds: bool, at: str, message: str) -> None:
    if not holds:
        raise UnsupportedSchema(f"{at}: {message}")
