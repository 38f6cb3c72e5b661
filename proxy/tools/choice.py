"""What an answer may call, and the form it must have when it has to call something."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.errors import BadRequest
from proxy.tools.definitions import AllowedChoice, FunctionDefinition, FunctionTool, NamedChoice
from wire.sampling import StructuredOutput

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of one request and how they may be used.

    `is_required`: the answer is one call or more; `named`: it is the arguments of that function. Both are
    forced on the model by structured output.
    """

    functions: tuple[FunctionDefinition, ...]
    is_required: bool = False
    named: str | None = None
    is_parallel: bool = True

    @property
    def is_forced(self) -> bool:
        return self.is_required or self.named is not None

    def for_template(self) -> list[dict[str, Any]]:
        """As OpenAI's bodies have them, without what the client did not say."""
        return [
            {"type": "function", "function": function.model_dump(exclude_none=True, exclude={"strict"})}
            for function in self.functions
        ]

    def structured_output(self) -> StructuredOutput | None:
        if self.named is not None:
            function = next(function for function in self.functions if function.name == self.named)
            return _as_output(_parameters_of(function))
        return _as_output(self._required_calls()) if self.is_required else None

    def _required_calls(self) -> Schema:
        definitions: Schema = {}
        calls = [_call_schema(index, function, definitions) for index, function in enumerate(self.functions)]
        schema: Schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        if not self.is_parallel:
            schema["maxItems"] = 1
        return {**schema, "$defs": definitions} if definitions else schema


def tool_use(
    tools: Sequence[FunctionTool], choice: str | NamedChoice | AllowedChoice | None, is_parallel: bool
) -> ToolUse | None:
    """None where nothing may be called; the model is not told about tools that it may not call."""
    functions = tuple(tool.function for tool in tools)
    if functions and choice == "none":
        return None
    if not functions:
        if choice in (None, "none", "auto"):
            return None
        raise BadRequest("tool_choice needs tools", param="tool_choice", code="invalid_value")
    if isinstance(choice, NamedChoice):
        name = choice.function.name
        _check_names(functions, [name])
        return ToolUse(functions=functions, named=name, is_parallel=False)
    mode: str | None
    if isinstance(choice, AllowedChoice):
        names, mode = choice.names, choice.allowed_tools.mode
        _check_names(functions, names)
        functions = tuple(function for function in functions if function.name in names)
    else:
        mode = choice
    return ToolUse(functions=functions, is_required=mode == "required", is_parallel=is_parallel)


def _check_names(functions: Sequence[FunctionDefinition], names: Sequence[str]) -> None:
    known = {function.name for function in functions}
    for name in names:
        if name not in known:
            raise BadRequest(
                f"tool_choice names {name!r}, which is not one of the tools",
                param="tool_choice",
                code="invalid_value",
            )


def _as_output(schema: Schema) -> StructuredOutput:
    return StructuredOutput(kind="json_schema", value=json.dumps(schema, ensure_ascii=False))


def _parameters_of(function: FunctionDefinition) -> Schema:
    return function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _call_schema(index: int, function: FunctionDefinition, definitions: Schema) -> Schema:
    """One call of the function; the definitions its parameters refer to move to where they are found."""
    parameters = dict(_parameters_of(function))
    own = {**parameters.pop("definitions", {}), **parameters.pop("$defs", {})}
    prefix = f"f{index}_"
    definitions.update({prefix + name: _with_moved_refs(value, prefix) for name, value in own.items()})
    return {
        "type": "object",
        "properties": {
            "name": {"type": "string", "enum": [function.name]},
            "arguments": _with_moved_refs(parameters, prefix),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _with_moved_refs(value: object, prefix: str) -> object:
    if isinstance(value, list):
        return [_with_moved_refs(item, prefix) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: _moved_ref(item, prefix) if key == "$ref" and isinstance(item, str)
        else _with_moved_refs(item, prefix)
        for key, item in value.items()
    }  # fmt: skip


def _moved_ref(ref: str, prefix: str) -> str:
    for root in ("#/$defs/", "#/definitions/"):
        if ref.startswith(root):
            return f"#/$defs/{prefix}{ref.removeprefix(root)}"
    return ref
