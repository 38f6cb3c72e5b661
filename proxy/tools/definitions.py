"""Tools and the choice among them, as bodies carry them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from proxy.body_parsing import Strict

MAX_TOOLS = 128

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]


class FunctionDefinition(Strict):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema; without one the function takes nothing."""
    strict: bool | None = None
    """Calls that are forced always follow the schema; free ones are the model's own."""


def _only_functions(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise PydanticCustomError(
            "unsupported", "tools must be of type 'function', got {kind}", {"kind": repr(kind)}
        )
    return validate(value)


class FunctionTool(Strict):
    type: Literal["function"]
    function: FunctionDefinition


def refuse_equal_names(names: Sequence[str]) -> None:
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise PydanticCustomError("invalid", "{name} is defined twice", {"name": repr(min(twice))})


def _different_names(tools: list[FunctionTool]) -> list[FunctionTool]:
    refuse_equal_names([tool.function.name for tool in tools])
    return tools


ToolT = TypeVar("ToolT")
OnlyFunctions = Annotated[ToolT, WrapValidator(_only_functions)]

ToolList = Annotated[
    list[OnlyFunctions[FunctionTool]],
    Field(max_length=MAX_TOOLS),
    AfterValidator(_different_names),
]


class FunctionReference(Strict):
    name: str


class NamedChoice(Strict):
    type: Literal["function"]
    function: FunctionReference


ToolChoiceMode = Literal["none", "auto", "required"]


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: list[OnlyFunctions[NamedChoice]] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedChoice(Strict):
    """Of the tools, only these."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    @property
    def names(self) -> list[str]:
        return [tool.function.name for tool in self.allowed_tools.tools]


def _known_choice(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    try:
        return validate(value)
    except ValidationError:
        raise PydanticCustomError(
            "invalid",
            "must be 'none', 'auto', 'required', or an object of type 'function' with a name, or of type"
            " 'allowed_tools' with a mode and tools",
        ) from None


known_choice = WrapValidator(_known_choice)
ToolChoice = Annotated[ToolChoiceMode | NamedChoice | AllowedChoice, known_choice]


class CalledFunction(Strict):
    name: str
    arguments: str
    """JSON text."""


class ToolCall(Strict):
    """One call in a message of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
