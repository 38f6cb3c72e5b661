"""`tandem serve --engine normal --tp 3`: one engine of three processes, and what the loss of one does."""

import os
import signal
from collections.abc import Iterator

import openai
import psutil
import pytest

from tests.system.processes import RunningStack, eventually
from tests.system.test_dp import MODEL, complete, expected

pytestmark = pytest.mark.system

PROMPT, OTHER = "The capital of France is", "Water boils at"


@pytest.fixture(scope="module")
def stack() -> Iterator[RunningStack]:
    with RunningStack(dtype="fp32", engine="normal", tp=3, kv_bytes=256 << 20) as stack:
        yield stack


def rank_processes(stack: RunningStack) -> list[psutil.Process]:
    return stack.services["normal"].engine_process().children()


def test_three_ranks_answer_as_one_engine_does(stack: RunningStack) -> None:
    assert len(rank_processes(stack)) == 2
    assert complete(stack, PROMPT) == expected(PROMPT)


def test_a_stream_fails_with_the_loss_of_a_rank_and_the_engine_comes_back(stack: RunningStack) -> None:
    service = stack.services["normal"]
    epoch, (first, second) = service.info()["epoch"], rank_processes(stack)
    with stack.client() as client:
        stream = client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=4000,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        os.kill(first.pid, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="rank 1 of the engine has ended with code -9"):
            list(stream)
    eventually(lambda: not second.is_running(), "the other rank has ended too")
    eventually(service.is_ready, "the service has started another engine", 60.0)
    eventually(stack.services["proxy"].is_ready, "the proxy has seen it")
    assert service.info()["epoch"] != epoch
    assert complete(stack, OTHER) == expected(OTHER)
    assert len(rank_processes(stack)) == 2
