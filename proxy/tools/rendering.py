"""Conversations with tools for models whose chat template knows none.

The functions are listed in the system message, and calls and their results are written as text, all in the
Hermes format, which the parser reads back.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from proxy.tools.choice import ToolUse

Message = Mapping[str, Any]

INSTRUCTIONS = """\
You can call the functions that are listed here, one JSON object a line:
<tools>
{functions}
</tools>
To call a function, write a JSON object with its name and its arguments between tags, and nothing after it:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>
The result comes between <tool_response> and </tool_response>. Where no function helps, just answer."""


def plain_messages(messages: Sequence[Message], use: ToolUse | None) -> list[Message]:
    """The same conversation in messages of the roles system, user and assistant, each with a text only."""
    plain: list[dict[str, Any]] = []
    previous_role = None
    for message in messages:
        rewritten = _plain(message)
        if message["role"] == previous_role == "tool":
            plain[-1]["content"] += "\n" + rewritten["content"]
        else:
            plain.append(rewritten)
        previous_role = message["role"]
    return list(plain) if use is None else _with_instructions(plain, use)


def _plain(message: Message) -> dict[str, Any]:
    content = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [_call_text(call["function"]) for call in message.get("tool_calls", ())]
    kept = {name: value for name, value in message.items() if name in ("role", "name", "reasoning_content")}
    return {**kept, "content": "\n".join([content, *calls] if content else calls) if calls else content}


def _call_text(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _with_instructions(messages: Sequence[Message], use: ToolUse) -> list[Message]:
    functions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in use.for_template())
    text = INSTRUCTIONS.format(functions=functions)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
