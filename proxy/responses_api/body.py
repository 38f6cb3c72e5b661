"""The body of `/v1/responses`, and the chat that it asks for.

Every request stands for itself: what would need a stored response (`previous_response_id`, `conversation`,
`background`) is refused; `store` is accepted, and the answer says `store: false`.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from proxy.body_parsing import Strict, parse_body
from proxy.chat_messages import Message
from proxy.content import ResponsesContent
from proxy.openai_types import ChatRequest, SamplingFields
from proxy.structured_fields import (
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    NamedSchema,
    ResponseFormat,
    TextFormat,
)
from proxy.tools.definitions import (
    MAX_TOOLS,
    AllowedChoice,
    AllowedTools,
    CalledFunction,
    FunctionDefinition,
    FunctionName,
    FunctionReference,
    FunctionTool,
    NamedChoice,
    OnlyFunctions,
    ToolCall,
    ToolChoiceMode,
    known_choice,
    refuse_equal_names,
)
from wire.sampling import MAX_TOP_LOGPROBS

LOGPROBS = "message.output_text.logprobs"


class MessageItem(Strict):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: ResponsesContent


class FunctionCallItem(Strict):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: ResponsesContent


class ReasoningItem(Strict):
    """Of an earlier answer; the model does not get to see it again."""

    type: Literal["reasoning"]


def _item_type(item: object) -> str | None:
    if isinstance(item, Mapping):
        return item.get("type", "message") if isinstance(item.get("type", "message"), str) else None
    return getattr(item, "type", None)


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_type),
]
Input = Annotated[
    list[InputItem],
    Field(min_length=1),
    BeforeValidator(
        lambda value: [{"role": "user", "content": value}] if isinstance(value, str) else value,
        json_schema_input_type=str | Annotated[list[InputItem], Field(min_length=1)],
    ),
]


class ResponsesTool(Strict):
    """A function; unlike a chat's, its definition is not nested."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


def _different_names(tools: list[ResponsesTool]) -> list[ResponsesTool]:
    refuse_equal_names([tool.name for tool in tools])
    return tools


ResponsesToolList = Annotated[
    list[OnlyFunctions[ResponsesTool]], Field(max_length=MAX_TOOLS), AfterValidator(_different_names)
]


class ResponsesNamedChoice(Strict):
    type: Literal["function"]
    name: str


class ResponsesAllowedChoice(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[OnlyFunctions[ResponsesNamedChoice]] = Field(min_length=1, max_length=MAX_TOOLS)


ResponsesChoice = ToolChoiceMode | ResponsesNamedChoice | ResponsesAllowedChoice


class ResponsesSchemaFormat(Strict):
    type: Literal["json_schema"]
    name: str = Field(min_length=1, max_length=64)
    schema_: JsonSchema = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(Strict):
    format: (
        Annotated[TextFormat | JsonObjectFormat | ResponsesSchemaFormat, Field(discriminator="type")] | None
    ) = None


class ReasoningConfig(Strict):
    effort: str | None = None


class ResponsesRequest(SamplingFields):
    model: str
    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    stream: bool | None = None
    tools: ResponsesToolList | None = None
    tool_choice: Annotated[ResponsesChoice, known_choice] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    """`message.output_text.logprobs` has an effect."""
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    metadata: dict[str, Any] | None = None
    user: str | None = None

    def as_chat(self) -> "ResponsesChat":
        sampling = {name: getattr(self, name) for name in SamplingFields.model_fields}
        wants_logprobs = LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
        chosen = {"response_format": _chat_format(self.text)} if self.text and self.text.format else {}
        return ResponsesChat(
            **{**sampling, **chosen},
            source=self,
            model=self.model,
            messages=_messages(self.instructions, self.input),
            max_completion_tokens=self.max_output_tokens,
            logprobs=wants_logprobs or None,
            top_logprobs=self.top_logprobs if wants_logprobs else None,
            tools=[_chat_tool(tool) for tool in self.tools or ()] or None,
            tool_choice=_chat_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            stream=self.stream,
        )


class ResponsesChat(ChatRequest):
    """The chat behind a request to `/v1/responses`; errors name that request's fields."""

    prompt_field: ClassVar[str] = "input"

    source: ResponsesRequest

    @property
    def asked_max_tokens(self) -> tuple[str, int | None]:
        return "max_output_tokens", self.max_completion_tokens


_ASKS_FOR_NOTHING: Mapping[str, tuple[object, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "max_tool_calls": (),
    "context_management": (),
    "moderation": (),
}


def parse_responses(body: bytes) -> ResponsesChat:
    return parse_body(ResponsesRequest, body, _ASKS_FOR_NOTHING).as_chat()


def _messages(instructions: str | None, items: Sequence[InputItem]) -> list[Message]:
    """Calls that follow each other, or a text of the assistant, are one message."""
    messages = [] if instructions is None else [Message(role="system", content=instructions)]
    for item in items:
        match item:
            case MessageItem(role=role, content=content):
                messages.append(Message(role=role, content=content))
            case FunctionOutputItem(call_id=call_id, output=output):
                messages.append(Message(role="tool", tool_call_id=call_id, content=output))
            case FunctionCallItem():
                _add_call(messages, item)
    return messages or [Message(role="user", content="")]


def _add_call(messages: list[Message], item: FunctionCallItem) -> None:
    call = ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
    if messages and messages[-1].role == "assistant":
        said = messages.pop()
        calls = [*(said.tool_calls or ()), call]
        messages.append(Message(role="assistant", content=said.content, tool_calls=calls))
    else:
        messages.append(Message(role="assistant", tool_calls=[call]))


def _chat_tool(tool: ResponsesTool) -> FunctionTool:
    function = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return FunctionTool(type="function", function=function)


def _chat_choice(choice: ResponsesChoice | None) -> ToolChoiceMode | NamedChoice | AllowedChoice | None:
    match choice:
        case ResponsesNamedChoice():
            return _named(choice)
        case ResponsesAllowedChoice(mode=mode, tools=tools):
            allowed = AllowedTools(mode=mode, tools=[_named(tool) for tool in tools])
            return AllowedChoice(type="allowed_tools", allowed_tools=allowed)
        case _:
            return choice


def _named(choice: ResponsesNamedChoice) -> NamedChoice:
    return NamedChoice(type="function", function=FunctionReference(name=choice.name))


def _chat_format(text: TextConfig) -> ResponseFormat | None:
    if isinstance(text.format, ResponsesSchemaFormat):
        named = NamedSchema(name=text.format.name, schema=text.format.schema_)
        return JsonSchemaFormat(type="json_schema", json_schema=named)
    return text.format
