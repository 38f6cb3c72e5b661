"""Calls in the formats of models, found whatever pieces the text comes in."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.tools.choice import ToolUse
from proxy.tools.definitions import FunctionDefinition
from proxy.tools.parsers import ToolFormat, tool_parser

USE = ToolUse(functions=(FunctionDefinition(name="f"), FunctionDefinition(name="g")))
REQUIRED = ToolUse(functions=USE.functions, is_required=True)

Calls = list[tuple[str, str]]


def parsed(pieces: Sequence[str], format: ToolFormat, use: ToolUse = USE) -> tuple[str, Calls]:
    """The content, and (name, arguments) of each call, put together as clients do it."""
    parser = tool_parser(format, use)
    outputs = [*(parser.push(piece) for piece in pieces), parser.flush()]
    calls: list[list[str]] = []
    ids = []
    for delta in (delta for output in outputs for delta in output.calls):
        if delta.call_id is not None:
            assert delta.name is not None
            assert delta.index == len(calls)
            ids.append(delta.call_id)
            calls.append([delta.name, delta.arguments])
        else:
            assert delta.name is None
            assert delta.index == len(calls) - 1
            calls[-1][1] += delta.arguments
    assert len(set(ids)) == len(ids)
    return "".join(output.content for output in outputs), [(name, text) for name, text in calls]


CASES: list[tuple[ToolFormat, str, str, Calls]] = [
    ("hermes", "just text", "just text", []),
    (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"<"}}\n</tool_call>',
        "",
        [("f", '{"a": "}\\"<"}')],
    ),
    (
        "hermes",
        'Sure. <tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"arguments": {"x": [1]}, '
        '"name": "g"}</tool_call>\n done',
        "Sure. done",
        [("f", "{}"), ("g", '{"x": [1]}')],
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [("f", '{"a": 1}')]),
    ("hermes", "<tool_call> not a call", "<tool_call> not a call", []),
    ("hermes", '<tool_call>{"nam": 1, 5} x', '<tool_call>{"nam": 1, 5} x', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    ("hermes", '<tool_call>{"na', '<tool_call>{"na', []),
    ("hermes", "a <tool_ca", "a <tool_ca", []),
    ("hermes", '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": null}}',
        "",
        [("f", "{}"), ("g", '{"b": null}')],
    ),
    ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3_json", 'text {"name": "f", "parameters": {}}', 'text {"name": "f", "parameters": {}}', []),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": [1, 2]}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", '{"a": [1, 2]}'), ("g", "{}")],
    ),
    (
        "mistral",
        'Ok[TOOL_CALLS]f{"a": {"b": 1}}[TOOL_CALLS]g[ARGS]{}',
        "Ok",
        [("f", '{"a": {"b": 1}}'), ("g", "{}")],
    ),
    ("mistral", "[TOOL_CALLS] what", "[TOOL_CALLS] what", []),
]  # fmt: skip


@pytest.mark.parametrize(("format", "text", "content", "calls"), CASES)
def test_calls_and_content_of_whole_texts_and_of_single_characters(
    format: ToolFormat, text: str, content: str, calls: Calls
) -> None:
    assert parsed([text], format) == (content, calls)
    assert parsed(list(text), format) == (content, calls)


FORCED = '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'


def test_a_forced_list_and_a_named_call() -> None:
    assert parsed([FORCED], "hermes", REQUIRED) == ("", [("f", '{"a": 1}'), ("g", "{}")])
    named = ToolUse(functions=USE.functions, named="g", is_parallel=False)
    assert parsed(['{"a"', ": 1}"], "hermes", named) == ("", [("g", '{"a": 1}')])


PARTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '{"name": "f", ', '"parameters": {}}',
     '"arguments": {"a": 1}}', "[", "]", ",", "{", "}", '"', "\\", " ", "\n", "f", "[ARGS]", ";", "🙂",
     "<tool"]
)  # fmt: skip


@settings(max_examples=300)
@given(
    format=st.sampled_from(["hermes", "llama3_json", "mistral"]),
    use=st.sampled_from([USE, REQUIRED]),
    text=st.lists(PARTS, max_size=14).map("".join),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=6),
)
def test_pieces_make_no_difference(format: ToolFormat, use: ToolUse, text: str, cuts: list[int]) -> None:
    pieces, rest, turn = [], text, 0
    while rest:
        size = cuts[turn % len(cuts)]
        pieces.append(rest[:size])
        rest, turn = rest[size:], turn + 1
    assert parsed(pieces, format, use) == parsed([text], format, use)


VALUES = st.recursive(
    st.none() | st.text(max_size=8) | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=100)
@given(arguments=st.dictionaries(st.text(max_size=5), VALUES, max_size=4))
def test_any_json_object_comes_through_as_it_was_written(arguments: dict[str, object]) -> None:
    text = json.dumps(arguments)
    call = f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>'
    assert parsed(list(call), "hermes") == ("", [("f", text)])
