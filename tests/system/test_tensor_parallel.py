"""`tandem serve --engine normal --tp 3`: one engine of three processes, and what the loss of one does."""

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.system.chaos import Ask, Streams
from tests.system.processes import RunningStack, eventually
from tests.system.test_dp import complete, expected

pytestmark = pytest.mark.system

MIGRATIONS = "tandem_proxy_migrations_total"
PROMPT, OTHER = "The capital of France is", "Water boils at"


@pytest.fixture(scope="module")
def stack() -> Iterator[RunningStack]:
    with RunningStack(
        dtype="fp32",
        engine="normal",
        tp=3,
        kv_bytes=256 << 20,
        extra={"proxy": ("--migration-wait-s", "150")},
    ) as stack:
        yield stack


def rank_processes(stack: RunningStack) -> list[psutil.Process]:
    return stack.services["normal"].engine_process().children()


def test_three_ranks_answer_as_one_engine_does(stack: RunningStack) -> None:
    assert len(rank_processes(stack)) == 2
    assert complete(stack, PROMPT) == expected(PROMPT)


def test_a_stream_outlives_the_loss_of_a_rank_and_the_engine_comes_back(stack: RunningStack) -> None:
    """The engine ends with its rank; the proxy goes on with the stream at the one that its service starts."""
    service, asks = stack.services["normal"], [Ask(0, 4000, num_read=250)]
    undisturbed = Streams(stack, asks).run()
    epoch, (first, second) = service.epoch(), rank_processes(stack)

    def kill() -> None:
        os.kill(first.pid, signal.SIGKILL)
        eventually(
            lambda: service.epoch() not in (epoch, None), "its service has started another engine", 120
        )
        eventually(lambda: stack.services["proxy"].metric(MIGRATIONS) > 0, "the stream goes on there", 120)

    assert Streams(stack, asks).run(kill, after_chunks=1) == undisturbed
    log = service.log_path.read_text()
    # The process has ended, or a rank that still runs has lost its connection: whichever is seen first.
    assert "rank 1 of the engine has ended with code -9" in log or "a rank of --tp 3 is lost or silent" in log
    eventually(lambda: not second.is_running(), "the other rank has ended too")
    assert complete(stack, OTHER) == expected(OTHER)
    assert len(rank_processes(stack)) == 2
