"""Renders a model's chat template: Jinja2 in a sandbox, with what Hugging Face templates expect to find."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from proxy.chat_messages import TemplateMessage
from proxy.errors import BadRequest


class ChatTemplate:
    """One compiled template; `render` may be called from any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text up to where the assistant speaks; `BadRequest` when the template says no."""
        try:
            return self._template.render(
                {
                    **(variables or {}),
                    **self._special_tokens,
                    "messages": [dict(message) for message in messages],
                    "add_generation_prompt": True,
                    "tools": None if tools is None else list(tools),
                    "documents": None,
                }
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise BadRequest(
                f"the model's chat template does not take these messages: {error}",
                param="messages",
                code="invalid_messages",
            ) from error


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - the attribute Jinja2 reads

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """Unlike Jinja2's own filter it does not escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
