"""Clients that leave, engines that are killed: nothing stays pinned, and what can go on goes on."""

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.system.chaos import Ask, Streams
from tests.system.processes import RunningStack, ServiceProcess, eventually

pytestmark = pytest.mark.system

MODEL = "smollm2-135m-instruct"
FAILED_WITHIN_S = 6.0
"""Shorter than an engine may be silent (7 s) before its service ends it."""
NUM_CANCELLED = int(os.environ.get("TANDEM_NUM_CANCELLED", "200"))


@pytest.fixture(scope="module", params=["nixl", "zmq"])
def stack(request: pytest.FixtureRequest) -> Iterator[RunningStack]:
    with RunningStack(
        dtype="fp32",
        transport=request.param,
        max_num_batched_tokens=64,
        extra={"proxy": ("--migration-wait-s", "150")},
    ) as stack:
        yield stack


def ask(stack: RunningStack) -> str:
    with stack.client() as client:
        answer = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=4)
    return answer.choices[0].text


def leave_early(stack: RunningStack, chance: random.Random) -> None:
    """Send a request and close the connection after a random part of its life."""
    body = {
        "model": MODEL,
        "prompt": [chance.randrange(10, 40000) for _ in range(chance.choice((1, 40, 64, 200)))],
        "max_tokens": chance.choice((1, 2, 40)),
        "n": chance.choice((1, 1, 3)),
        "stream": chance.random() < 0.7,
    }
    timeout = httpx.Timeout(30.0, read=chance.choice((0.001, 0.02, 0.1, 0.5)))
    try:
        with httpx.stream("POST", stack.url + "/v1/completions", json=body, timeout=timeout) as answer:
            for _ in answer.iter_lines():
                if chance.random() < 0.2:
                    return
    except httpx.ReadTimeout:
        pass


def test_t4_clients_that_leave_pin_nothing(stack: RunningStack) -> None:
    """200 of them; `make chaos` has 1,000."""
    chances = [random.Random(seed) for seed in range(NUM_CANCELLED)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda chance: leave_early(stack, chance), chances))
    stack.wait_until_nothing_is_pinned()
    ask(stack)


def num_migrations(stack: RunningStack) -> float:
    return stack.services["proxy"].metric("tandem_proxy_migrations_total")


def kill_engine(service: ServiceProcess) -> float:
    killed_s = time.monotonic()
    os.kill(service.engine_process().pid, signal.SIGKILL)
    return killed_s


def test_the_stream_of_a_killed_completion_engine_goes_on_when_it_is_back(stack: RunningStack) -> None:
    asks = [Ask(0, 7500, num_read=400)]
    expected = Streams(stack, asks).run()
    old_epoch, num_before = stack.completion.epoch(), num_migrations(stack)

    def kill() -> None:
        kill_engine(stack.completion)
        eventually(lambda: stack.completion.epoch() not in (old_epoch, None), "there is another engine", 120)
        eventually(lambda: num_migrations(stack) > num_before, "the stream goes on there", 120)

    assert Streams(stack, asks).run(kill, after_chunks=1) == expected
    stack.wait_until_nothing_is_pinned()


def test_killed_prompt_engine_fails_its_prompt_at_once_and_comes_back(stack: RunningStack) -> None:
    def long_prompt() -> tuple[int, float]:
        body = {"model": MODEL, "prompt": list(range(100, 6100)), "max_tokens": 4}
        answer = httpx.post(stack.url + "/v1/completions", json=body, timeout=60)
        return answer.status_code, time.monotonic()

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(long_prompt)
        eventually(lambda: stack.prompt.num_free_blocks() < stack.prompt.num_usable_blocks(), "prefill runs")
        killed_s = kill_engine(stack.prompt)
        status, failed_s = asking.result(timeout=30)
    assert status in (502, 503)
    assert failed_s - killed_s < FAILED_WITHIN_S
    eventually(stack.prompt.is_ready, "the prompt engine is ready again", 90)
    eventually(stack.services["proxy"].is_ready, "the proxy has a pair again", 90)
    ask(stack)
    stack.wait_until_nothing_is_pinned()
