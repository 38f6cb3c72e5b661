"""From a body's bytes to a validated request, or a `BadRequest` that names the field as OpenAI does."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from proxy.errors import BadRequest


class Strict(BaseModel):
    """Base of every body: no type is converted, unknown fields are ignored (gateways add their own)."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


ModelT = TypeVar("ModelT", bound=BaseModel)

_CODES = {
    "missing": "missing_required_parameter",
    "unsupported": "unsupported_parameter",
}


def parse_body(
    model: type[ModelT], body: bytes, asks_for_nothing: Mapping[str, tuple[object, ...]] | None = None
) -> ModelT:
    """`asks_for_nothing`: fields that are not supported, with the values (beside null) that are harmless."""
    fields = parse_json(body)
    if asks_for_nothing and not asks_for_nothing.keys().isdisjoint(fields):
        _refuse_unsupported(fields, asks_for_nothing)
    return validated(model, fields)


def parse_json(body: bytes) -> dict[str, Any]:
    """The body's object; refuses malformed or too deeply nested JSON, NaN, and text that is no Unicode."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise BadRequest("the body's JSON is nested too deeply", code="invalid_json") from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    return value


def validated(model: type[ModelT], fields: Mapping[str, Any]) -> ModelT:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _bad_request(error, fields) from None


def unsupported(name: str, value: object) -> BadRequest:
    return BadRequest(
        f"{name} is not supported by this server (got {_shortened(value)})",
        param=name,
        code="unsupported_parameter",
    )


def _refuse_unsupported(
    fields: Mapping[str, Any], asks_for_nothing: Mapping[str, tuple[object, ...]]
) -> None:
    for name, neutrals in asks_for_nothing.items():
        if name not in fields:
            continue
        value = fields[name]
        if value is not None and not any(_is_same(value, neutral) for neutral in neutrals):
            raise unsupported(name, value)


def _is_same(value: object, neutral: object) -> bool:
    """Equality that tells true from 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _bad_request(error: ValidationError, fields: Mapping[str, Any]) -> BadRequest:
    first = error.errors(include_url=False)[0]
    param = _param(first, fields)
    code = _CODES.get(first["type"], "invalid_type" if first["type"].endswith("_type") else "invalid_value")
    return BadRequest(f"{param}: {first['msg']}" if param else first["msg"], param=param, code=code)


def _param(error: ErrorDetails, fields: Mapping[str, Any]) -> str | None:
    """The field's path as OpenAI writes it, such as `messages[2].content`.

    Where a field can be of several types, pydantic's own path has their names in it: they lead nowhere in
    the body and are left out.
    """
    path, value = "", fields
    num_parts = len(error["loc"])
    for number, part in enumerate(error["loc"], start=1):
        if isinstance(part, int):
            path += f"[{part}]"
            value = value[part] if isinstance(value, list) and part < len(value) else {}
        elif isinstance(value, dict) and part in value:
            path, value = _joined(path, part), value[part]
        elif error["type"] == "missing" and number == num_parts:
            path = _joined(path, part)
    context = error.get("ctx") or {}
    return (_joined(path, str(context["field"])) if "field" in context else path) or None


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
