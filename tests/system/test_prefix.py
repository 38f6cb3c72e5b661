"""A conversation on the real model: every turn starts behind the last, and is answered as if it did not."""

from collections.abc import Iterator
from functools import cache

import httpx
import pytest

from model_files.resolve import resolve_model
from tests.engine.reference import reference_generate
from tests.system.processes import RunningStack, eventually, post
from wire.cache import prompt_block_names

pytestmark = pytest.mark.system

MODEL = "smollm2-135m-instruct"
NUM_TOKENS = 20
BLOCK_SIZE = 16
TURNS = (
    "Once upon a time there was a girl who lived with her grandmother in a small house at the edge of a "
    "large forest. Every morning she walked to the village to sell the bread that they had baked. One day",
    " But then it began to rain, and",
    " In the evening",
)


@cache
def conversation() -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """(prompt, answer) of each turn, as transformers gives it greedily."""
    files = resolve_model(MODEL)
    tokenizer = files.tokenizer()
    turns, prompt = [], []
    for said in TURNS:
        prompt += tokenizer.encode(said).ids
        answer = reference_generate(files, prompt, NUM_TOKENS)
        turns.append((tuple(prompt), tuple(answer)))
        prompt += answer
    return tuple(turns)


@pytest.fixture(scope="module", params=["pair", "normal"])
def warm_stack(request: pytest.FixtureRequest) -> Iterator[RunningStack]:
    with RunningStack(
        dtype="fp32", transport="zmq", engine=request.param, max_num_batched_tokens=64, block_size=BLOCK_SIZE
    ) as stack:
        yield stack


def ask(stack: RunningStack, prompt: tuple[int, ...], **options: object) -> tuple[str, int]:
    """The greedy answer and how many prompt tokens were cached."""
    body = {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = post(stack.url + "/v1/completions", {**body, **options}).json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def full_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK_SIZE * BLOCK_SIZE


def test_every_turn_starts_behind_the_last_and_is_answered_as_from_the_beginning(
    warm_stack: RunningStack,
) -> None:
    tokenizer = resolve_model(MODEL).tokenizer()
    num_known = 0
    for prompt, answer in conversation():
        text, num_cached = ask(warm_stack, prompt)
        assert text == tokenizer.decode(list(answer), skip_special_tokens=True)
        assert full_blocks(num_known) <= num_cached < len(prompt)
        num_known = len(prompt)
    text, num_cached = ask(warm_stack, prompt)
    assert num_cached == full_blocks(len(prompt) - 1)
    assert text == tokenizer.decode(list(answer), skip_special_tokens=True)


def test_another_salt_finds_nothing(warm_stack: RunningStack) -> None:
    prompt, _ = conversation()[0]
    assert ask(warm_stack, prompt, cache_salt="a")[1] == 0
    assert ask(warm_stack, prompt, cache_salt="a")[1] > 0
    assert ask(warm_stack, prompt, cache_salt="b")[1] == 0


def test_routers_are_told_what_is_cached(warm_stack: RunningStack) -> None:
    url = (warm_stack.services.get("prompt") or warm_stack.services["normal"]).url + "/v1/cache/events"
    known = httpx.get(url).json()
    assert [event["kind"] for event in known["events"]] == ["cleared", "stored"]
    prompt = tuple(range(1000, 1000 + 2 * BLOCK_SIZE + 1))
    ask(warm_stack, prompt, cache_salt="router")
    names, after = prompt_block_names(prompt, known["block_size"], "router"), known["next_event"]
    told: list[str] = []

    def are_told() -> bool:
        """What was stored before, under other names, may be told first."""
        nonlocal after
        news = httpx.get(
            url, params={"epoch": known["epoch"], "after": after, "wait_s": 1}, timeout=20
        ).json()
        stored = [name for event in news["events"] if event["kind"] == "stored" for name in event["names"]]
        told.extend(name for name in stored if name in names)
        after = news["next_event"]
        return len(told) >= len(names)

    eventually(are_told, "the blocks of the prompt are told")
    assert told == names
