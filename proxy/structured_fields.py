"""What form an answer must have: `response_format`, and the fields vLLM's clients send for it."""

import json
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from proxy.body_parsing import Strict
from proxy.errors import BadRequest
from wire.sampling import StructuredOutput

JsonSchema = dict[str, Any]


class NamedSchema(Strict):
    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    schema_: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`; exactly one of its fields is set."""

    json_: JsonSchema | str | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = Field(None, min_length=1)
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = Field(None, min_length=1)


class StructuredFields(Strict):
    """Mixed into requests; at most one of these may ask for something."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """An extension, as are the `guided_*` fields, its older spelling."""
    guided_json: JsonSchema | str | None = None
    guided_regex: str | None = Field(None, min_length=1)
    guided_choice: list[str] | None = Field(None, min_length=1)
    guided_grammar: str | None = Field(None, min_length=1)

    def structured_output(self) -> StructuredOutput | None:
        """What engines are told; `BadRequest` where two fields ask for different things."""
        if not self._asks_for_form():
            return None
        wishes = self._wishes()
        if len(wishes) > 1:
            first, second, *_ = wishes
            raise BadRequest(f"{second} cannot be used beside {first}", param=second, code="invalid_value")
        return next(iter(wishes.values()), None)

    @property
    def structured_field(self) -> str:
        """The field that errors about the form should name."""
        return next(iter(self._wishes()), "response_format")

    def _asks_for_form(self) -> bool:
        return not (
            self.response_format is None
            and self.structured_outputs is None
            and self.guided_json is None
            and self.guided_regex is None
            and self.guided_choice is None
            and self.guided_grammar is None
        )

    def _wishes(self) -> dict[str, StructuredOutput]:
        asked = {
            "response_format": _of_format(self.response_format),
            "structured_outputs": _of_structured_outputs(self.structured_outputs),
            "guided_json": _json_schema(self.guided_json, "guided_json"),
            "guided_regex": _of_text("regex", self.guided_regex),
            "guided_choice": _choice(self.guided_choice),
            "guided_grammar": _of_text("ebnf", self.guided_grammar),
        }
        return {name: wish for name, wish in asked.items() if wish is not None}


def _of_format(format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> StructuredOutput | None:
    match format:
        case JsonObjectFormat():
            return StructuredOutput(kind="json_object")
        case JsonSchemaFormat(json_schema=named):
            return schema_output(named.schema_ or {})
        case _:
            return None


def _of_structured_outputs(wish: StructuredOutputs | None) -> StructuredOutput | None:
    if wish is None:
        return None
    asked = [
        _json_schema(wish.json_, "structured_outputs.json"),
        StructuredOutput(kind="json_object") if wish.json_object else None,
        _of_text("regex", wish.regex),
        _choice(wish.choice),
        _of_text("ebnf", wish.grammar),
    ]
    outputs = [output for output in asked if output is not None]
    if len(outputs) != 1:
        raise BadRequest(
            "structured_outputs needs exactly one of json, json_object, regex, choice and grammar",
            param="structured_outputs",
            code="invalid_value",
        )
    return outputs[0]


def schema_output(schema: JsonSchema) -> StructuredOutput:
    return StructuredOutput(kind="json_schema", value=json.dumps(schema, ensure_ascii=False))


def _json_schema(schema: JsonSchema | str | None, field: str) -> StructuredOutput | None:
    """A schema as an object, or as its text."""
    if schema is None or isinstance(schema, dict):
        return None if schema is None else schema_output(schema)
    try:
        parsed = msgspec.json.decode(schema)  # unlike `json` it takes neither NaN nor half a surrogate pair
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"{field} is not JSON: {error}", param=field, code="invalid_json") from None
    if not isinstance(parsed, dict):
        raise BadRequest(f"{field} is not a JSON schema", param=field, code="invalid_value")
    return schema_output(parsed)


def _of_text(kind: Literal["regex", "ebnf"], text: str | None) -> StructuredOutput | None:
    return None if text is None else StructuredOutput(kind=kind, value=text)


def _choice(choices: list[str] | None) -> StructuredOutput | None:
    if choices is None:
        return None
    return StructuredOutput(kind="choice", value=json.dumps(choices, ensure_ascii=False))
