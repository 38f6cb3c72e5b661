"""`n` through real processes: the prompt is computed and moved once, each choice is its seed's own answer."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import msgspec
import openai
import pytest

from model_files.resolve import resolve_model
from proxy.app import create_app
from proxy.settings import ProxySettings
from proxy.text_model import TextModel
from tests.proxy.builders import all_ready
from tests.proxy.mock_engines import Call, MockEngine, Script, serving
from tests.system.processes import RunningStack, ServiceProcess, eventually
from wire.sampling import SamplingParams
from wire.services import EngineInfo

pytestmark = pytest.mark.system

MODEL = "smollm2-135m-instruct"
PROMPT = "Once upon a time there was a"
NUM_TOKENS = 12
N = 4
SEED = 11
LEASE_S = 100.0
BACK_WITHIN_S = 1.0
NUM_TRIES = 3
"""A machine may pause for a second in one of them, hardly in all."""


@pytest.fixture(scope="module")
def stack() -> Iterator[RunningStack]:
    """Its prompt engine's lease is far longer than a test waits for blocks."""
    with RunningStack(
        dtype="fp32",
        transport="zmq",
        max_num_batched_tokens=64,
        extra={"prompt": ("--lease-s", str(LEASE_S))},
    ) as stack:
        yield stack


@pytest.fixture(scope="module")
def normal_stack() -> Iterator[RunningStack]:
    with RunningStack(dtype="fp32", engine="normal", max_num_batched_tokens=64) as stack:
        yield stack


@pytest.fixture(params=["pair", "normal"])
def any_stack(request: pytest.FixtureRequest) -> RunningStack:
    stack: RunningStack = request.getfixturevalue("stack" if request.param == "pair" else "normal_stack")
    return stack


def prefilling(stack: RunningStack) -> ServiceProcess:
    return stack.services.get("prompt") or stack.services["normal"]


def num_computed_prompt_tokens(service: ServiceProcess) -> float:
    lines = httpx.get(service.url + "/metrics", timeout=5.0).text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("tandem_engine_prompt_tokens_total{")
    )


def wait_until_nothing_is_pinned(stack: RunningStack) -> None:
    engines = [service for name, service in stack.services.items() if name != "proxy"]
    eventually(
        lambda: all(e.num_free_blocks() == e.num_usable_blocks() for e in engines), "all blocks are free"
    )


def texts(client: openai.OpenAI, n: int, seed: int, **options: object) -> list[str]:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=1.0, n=n, seed=seed, **options
    )
    assert [choice.index for choice in answer.choices] == list(range(n))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == num_prompt_tokens()
    return [choice.text for choice in answer.choices]


def num_prompt_tokens() -> int:
    return len(resolve_model(MODEL).tokenizer().encode(PROMPT).ids)


def test_every_choice_is_the_answer_of_its_own_seed_and_the_prompt_is_computed_once(
    any_stack: RunningStack,
) -> None:
    service = prefilling(any_stack)
    with any_stack.client() as client:
        before = num_computed_prompt_tokens(service)
        together = texts(client, N, SEED)
        assert num_computed_prompt_tokens(service) - before == num_prompt_tokens()
        seeds = [SamplingParams(max_tokens=1, seed=SEED).of_choice(choice).seed for choice in range(N)]
        assert seeds[0] == SEED
        assert together == [texts(client, 1, seed)[0] for seed in seeds]
    assert len(set(together)) == N
    wait_until_nothing_is_pinned(any_stack)


def test_streamed_choices_equal_the_same_choices_in_one_piece(any_stack: RunningStack) -> None:
    streamed = [""] * N
    reasons: list[str | None] = [None] * N
    with any_stack.client() as client:
        chunks = list(
            client.completions.create(
                model=MODEL,
                prompt=PROMPT,
                max_tokens=NUM_TOKENS,
                temperature=1.0,
                n=N,
                seed=SEED,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        whole = texts(client, N, SEED)
    for chunk in chunks:
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert streamed == whole
    assert set(reasons) <= {"length", "stop"}
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == num_prompt_tokens()
    wait_until_nothing_is_pinned(any_stack)


def test_greedy_chat_choices_are_equal(any_stack: RunningStack) -> None:
    with any_stack.client() as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=10,
            temperature=0,
            n=3,
        )
    contents = [choice.message.content for choice in answer.choices]
    assert len(set(contents)) == 1
    assert "Paris" in (contents[0] or "")
    assert answer.usage is not None
    assert answer.usage.completion_tokens % 3 == 0
    wait_until_nothing_is_pinned(any_stack)


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_the_shortest_answers_of_several_choices(any_stack: RunningStack, num_tokens: int) -> None:
    with any_stack.client() as client:
        answer = client.completions.create(
            model=MODEL, prompt=[42] * 33, max_tokens=num_tokens, temperature=1.0, n=8, seed=SEED
        )
    assert len(answer.choices) == 8
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 33
    assert 8 <= answer.usage.completion_tokens <= 8 * num_tokens
    wait_until_nothing_is_pinned(any_stack)


# ----- a real prompt engine whose blocks nobody takes


@asynccontextmanager
async def proxy_before(prompt: ServiceProcess, completion: Script) -> AsyncIterator[str]:
    """A proxy here that pairs a real prompt service with a scripted completion engine; yields its URL."""
    mock = MockEngine("completion", completion)
    info = msgspec.convert(prompt.info(), EngineInfo)
    mock.info = replace(info, role="completion", engine_id="mock", control_address=None)
    async with serving(mock) as url:
        settings = ProxySettings(model=MODEL, prompt_url=[prompt.url], completion_url=[url], refresh_s=60.0)
        app = create_app(settings, TextModel.from_files(resolve_model(MODEL)))
        async with serving(app, lifespan="on") as proxy_url:
            await all_ready(app.state.services)
            yield proxy_url


def holds_blocks(prompt: ServiceProcess) -> bool:
    return prompt.num_free_blocks() < prompt.num_usable_blocks()


async def soon(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    """`eventually`, without stopping this event loop."""
    deadline_s = time.monotonic() + timeout_s
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.01)


async def seconds_until_blocks_are_back(prompt: ServiceProcess) -> float:
    began_s = time.monotonic()
    await soon(lambda: not holds_blocks(prompt), "the blocks are back", LEASE_S / 5)
    return time.monotonic() - began_s


@pytest.mark.parametrize("n", [1, 3])
async def test_blocks_return_within_a_second_when_the_completion_engine_refuses(
    stack: RunningStack, n: int
) -> None:
    """T1: it refuses when the prompt engine has answered and holds its blocks under a lease."""
    prompt = stack.prompt

    async def completion(call: Call) -> None:
        await soon(lambda: holds_blocks(prompt), "the prompt is computed", 30.0)
        await call.refuse(429, "full", kind="rate_limit_error")

    took_s = []
    async with proxy_before(prompt, completion) as url, httpx.AsyncClient(trust_env=False) as client:
        for _ in range(NUM_TRIES):
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "n": n}
            response = await client.post(url + "/v1/completions", json=body, timeout=60)
            took_s.append(await seconds_until_blocks_are_back(prompt))
            assert response.status_code == 429
    assert min(took_s) < BACK_WITHIN_S


async def test_blocks_return_within_a_second_when_the_client_leaves_between_the_legs(
    stack: RunningStack,
) -> None:
    """T3, with a completion engine that accepts and never reads."""
    prompt, took_s = stack.prompt, []

    async def completion(call: Call) -> None:
        await call.accept()
        await asyncio.Event().wait()

    async with proxy_before(prompt, completion) as url, httpx.AsyncClient(trust_env=False) as client:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "stream": True}
        for _ in range(NUM_TRIES):
            async with client.stream("POST", url + "/v1/completions", json=body, timeout=60) as response:
                lines = response.aiter_lines()  # kept: a dropped one closes the connection
                assert (await anext(lines)).startswith("data: ")
                await soon(lambda: holds_blocks(prompt), "the prompt is computed", 30.0)
            took_s.append(await seconds_until_blocks_are_back(prompt))
    assert min(took_s) < BACK_WITHIN_S
