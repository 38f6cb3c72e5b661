"""Through real processes, greedy output equals transformers' on the same weights, token for token."""

import gzip
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import openai
import pytest

from model_files.resolve import resolve_model
from tests.engine.reference import reference_generate
from tests.system.processes import RunningStack

pytestmark = pytest.mark.system

MODEL = "smollm2-135m-instruct"
CHUNK = 64
NUM_TOKENS = 16
PROMPTS = Path(__file__).parent.parent / "data" / "prompts" / "forty_prompts.jsonl.gz"


@cache
def forty_prompts() -> tuple[tuple[int, ...], ...]:
    """Token ids of 40 prompts: MT-bench, HumanEval, UDHR in 15 languages."""
    tokenizer = resolve_model(MODEL).tokenizer()
    with gzip.open(PROMPTS, "rt") as file:
        texts = [json.loads(line)["text"] for line in file]
    return tuple(tuple(tokenizer.encode(text).ids[:200]) for text in texts)


@cache
def expected(prompt: tuple[int, ...]) -> str:
    """What transformers generates, decoded the way the proxy decodes."""
    ids = reference_generate(resolve_model(MODEL), list(prompt), NUM_TOKENS)
    return resolve_model(MODEL).tokenizer().decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module", params=["nixl", "zmq"])
def stack(request: pytest.FixtureRequest) -> Iterator[RunningStack]:
    with RunningStack(dtype="fp32", transport=request.param, max_num_batched_tokens=CHUNK) as stack:
        yield stack


def complete(client: openai.OpenAI, prompt: tuple[int, ...]) -> str:
    answer = client.completions.create(model=MODEL, prompt=list(prompt), max_tokens=NUM_TOKENS, temperature=0)
    return answer.choices[0].text


def test_forty_prompts_sixteen_at_once_equal_transformers(stack: RunningStack) -> None:
    prompts = forty_prompts()
    with stack.client() as client, ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(lambda prompt: complete(client, prompt), prompts))
    assert texts == [expected(prompt) for prompt in prompts]
    stack.wait_until_nothing_is_pinned()


@pytest.mark.parametrize("num_prompt_tokens", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 1])
def test_prompts_around_the_chunk_size_equal_transformers(
    stack: RunningStack, num_prompt_tokens: int
) -> None:
    text = [token_id for prompt in forty_prompts() for token_id in prompt]
    prompt = tuple(text[:num_prompt_tokens])
    with stack.client() as client:
        assert complete(client, prompt) == expected(prompt)
    stack.wait_until_nothing_is_pinned()
