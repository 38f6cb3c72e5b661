"""Two engines that do not fit each other refuse, naming the field that differs."""

import json

import pytest

from tests.system.processes import RunningStack, post

pytestmark = pytest.mark.system


def test_engines_with_other_weights_refuse_each_other_by_name_of_the_field(stack: RunningStack) -> None:
    """The pair of this module runs in fp32; a completion engine with packed weights joins it."""
    with RunningStack(dtype="fp16w", transport="zmq") as other:
        info = stack.prompt.info()
        prompt = {"request_id": "a", "handover_id": "h-1", "prompt_token_ids": [1, 2, 3]}
        sampling = {"max_tokens": 4, "temperature": 0.0}
        assert post(stack.prompt.url + "/v1/prompt", {**prompt, "sampling": sampling}).status_code == 200
        answer = post(
            other.completion.url + "/v1/completion",
            {
                **prompt,
                "sampling": sampling,
                "prompt_engine": {key: info[key] for key in ("engine_id", "epoch", "control_address")},
            },
        )
        (event,) = (json.loads(line[6:]) for line in answer.text.splitlines() if line)
        assert event["error_status"] == 409
        message = event["error"]["message"]
        assert "weights" in message
        assert "fp16w" in message
        assert "fp32" in message
        assert other.completion.num_free_blocks() == other.completion.num_usable_blocks()
    stack.wait_until_nothing_is_pinned()
