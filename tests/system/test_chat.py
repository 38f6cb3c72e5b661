"""A chat of several turns through real processes: nothing is moved twice, and no answer differs."""

import re

import httpx
import openai
import pytest

from tests.system.processes import RunningStack, ServiceProcess

pytestmark = pytest.mark.system

MODEL = "smollm2-135m-instruct"
BLOCK_SIZE = 16
NUM_TOKENS = 160  # an answer long enough to be worth fetching back
QUESTIONS = (
    "Tell me about the history of the city of Rome, from its founding to the end of the empire, in detail.",
    "Which of its emperors built most, and what is left of it today? Name several buildings.",
)


def counter(service: ServiceProcess, name: str) -> int:
    text = httpx.get(service.url + "/metrics", timeout=10.0).text
    found = re.search(rf'^tandem_transfer{{counter="{name}",.*?}} (\S+)$', text, re.MULTILINE)
    assert found is not None, f"no counter {name}"
    return int(float(found.group(1)))


def ask(client: openai.OpenAI, messages: list[dict[str, str]], salt: str) -> tuple[str, int]:
    """The answer and the number of prompt tokens."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]  # plain dicts are what the wire has
        max_tokens=NUM_TOKENS,
        temperature=0,
        extra_body={"cache_salt": salt, "ignore_eos": True},
    )
    assert answer.usage is not None
    return str(answer.choices[0].message.content), answer.usage.prompt_tokens


def test_every_turn_moves_only_what_is_new_and_answers_as_a_cold_run() -> None:
    """P9 and T16; the prompt engine fetches the answers of earlier turns from the completion engine."""
    with (
        RunningStack(
            dtype="fp32",
            transport="zmq",
            max_num_batched_tokens=64,
            block_size=BLOCK_SIZE,
            extra={"prompt": ("--pull-back-wait-s", "20")},
        ) as stack,
        stack.client() as client,
    ):
        messages: list[dict[str, str]] = []
        num_known = 0
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            before = [counter(stack.completion, name) for name in ("blocks_read", "blocks_skipped")]
            answer, num_prompt_tokens = ask(client, messages, "warm")
            after = [counter(stack.completion, name) for name in ("blocks_read", "blocks_skipped")]
            num_read, num_skipped = (new - old for new, old in zip(after, before, strict=True))
            assert num_read + num_skipped == -(-num_prompt_tokens // BLOCK_SIZE)
            assert num_skipped >= num_known // BLOCK_SIZE
            assert answer == ask(client, messages, f"cold {len(messages)}")[0]
            num_known = num_prompt_tokens
            messages.append({"role": "assistant", "content": answer})
        assert counter(stack.prompt, "pull_back_tokens") >= 128
        stack.wait_until_nothing_is_pinned()
