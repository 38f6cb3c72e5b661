"""The order in which items of one delta are written."""

import pytest

from proxy.message_delta import MessageDelta, ToolCallDelta
from proxy.responses_api.items import OutputItems

FIRST = ToolCallDelta(0, call_id="c0", name="f")
REST = ToolCallDelta(0, arguments="{}")


@pytest.mark.parametrize(
    ("deltas", "kinds"),
    [
        (
            [MessageDelta(tool_calls=(FIRST,)), MessageDelta(content="text", tool_calls=(REST,))],
            ["function_call", "message"],
        ),
        (
            [
                MessageDelta(tool_calls=(FIRST,)),
                MessageDelta(content="x", tool_calls=(REST, ToolCallDelta(1, "{}", "c1", "g"))),
            ],
            ["function_call", "message", "function_call"],
        ),
        ([MessageDelta(content="text", tool_calls=(FIRST, REST))], ["message", "function_call"]),
    ],
)
def test_the_end_of_a_call_comes_before_the_text_that_follows_it(
    deltas: list[MessageDelta], kinds: list[str]
) -> None:
    items = OutputItems(with_logprobs=False)
    for delta in deltas:
        items.push(delta)
    items.close("completed")
    output = items.as_json()
    assert [item["type"] for item in output] == kinds
    assert {item["arguments"] for item in output if item["type"] == "function_call"} == {"{}"}
