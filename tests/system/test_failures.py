"""Clients that leave, engines that are killed: nothing stays pinned, and what can go on goes on."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.system.processes import RunningStack, ServiceProcess, eventually

pytestmark = pytest.mark.system

MODEL = "smollm2-135m-instruct"
NUM_CANCELLED = int(os.environ.get("TANDEM_NUM_CANCELLED", "200"))


@pytest.fixture(scope="module", params=["nixl", "zmq"])
def stack(request: pytest.FixtureRequest) -> Iterator[RunningStack]:
    with RunningStack(dtype="fp32", transport=request.param, max_num_batched_tokens=64) as stack:
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


def stream(stack: RunningStack, has_begun: threading.Event, max_tokens: int) -> str:
    """The text of a streamed completion."""
    with stack.client() as client:
        chunks = client.completions.create(
            model=MODEL,
            prompt="Once upon a time",
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        texts = []
        for chunk in chunks:
            texts.append(chunk.choices[0].text)
            has_begun.set()
    return "".join(texts)


def kill_engine(service: ServiceProcess) -> float:
    killed_s = time.monotonic()
    os.kill(service.engine_process().pid, signal.SIGKILL)
    return killed_s


def test_the_stream_of_a_killed_completion_engine_goes_on_when_it_is_back(stack: RunningStack) -> None:
    has_begun = threading.Event()
    expected = stream(stack, threading.Event(), 100)
    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(stream, stack, has_begun, 100)
        assert has_begun.wait(30)
        old_epoch = stack.completion.info()["epoch"]
        kill_engine(stack.completion)
        assert streaming.result(timeout=60) == expected
    assert stack.completion.info()["epoch"] != old_epoch
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
    assert failed_s - killed_s < 2.0
    eventually(stack.prompt.is_ready, "the prompt engine is ready again", 90)
    eventually(stack.services["proxy"].is_ready, "the proxy has a pair again", 90)
    ask(stack)
    stack.wait_until_nothing_is_pinned()
