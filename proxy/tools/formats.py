"""Which format of calls a model uses, told by its chat template."""

from proxy.tools.parsers import GRAMMARS, ToolFormat

_MARKS: tuple[tuple[str, ToolFormat], ...] = (
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": ', "llama3_json"),
)


def tool_format_of(template: str | None) -> ToolFormat:
    """Hermes for templates that know no tools: our own rendering then asks for that format."""
    for mark, format in _MARKS:
        if template is not None and mark in template:
            return format
    return "hermes"


def visible_tags(format: ToolFormat) -> tuple[str, ...]:
    """Tags that the parser must see, though they may be special tokens of the model."""
    grammar = GRAMMARS[format]
    tags = (grammar.open_tag, grammar.close_tag)
    return tuple(tag for tag in tags if tag is not None) + (("[ARGS]",) if grammar.names_come_first else ())
