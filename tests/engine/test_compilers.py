"""Threads that compile: what is given up leaves nothing behind, and who is stuck holds nobody else up."""

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future

import pytest

from engine.compilers import MAX_STUCK, NUM_THREADS, Compilers

WAIT_S = 10.0


class Stuck:
    """Work that goes on until it is let go."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self) -> str:
        self.has_begun.set()
        assert self.may_end.wait(WAIT_S)
        return "late"


@pytest.fixture
def compilers() -> Iterator[Compilers[str]]:
    made = Compilers[str]()
    yield made
    made.close()


def keep_busy(compilers: Compilers[str], number: int) -> list[tuple[Stuck, Future[str]]]:
    busy = []
    for _ in range(number):
        work = Stuck()
        busy.append((work, compilers.submit(work)))
        assert work.has_begun.wait(WAIT_S)
    return busy


def let_go(busy: list[tuple[Stuck, Future[str]]]) -> None:
    for work, future in busy:
        work.may_end.set()
        assert future.result(WAIT_S) == "late"


def quick() -> str:
    return "quick"


def test_results_and_errors_are_the_futures(compilers: Compilers[str]) -> None:
    def fail() -> str:
        raise ValueError("no")

    assert compilers.submit(quick).result(WAIT_S) == "quick"
    with pytest.raises(ValueError, match="no"):
        compilers.submit(fail).result(WAIT_S)
    assert compilers.submit(quick).result(WAIT_S) == "quick"


def test_what_is_given_up_before_it_began_is_forgotten_at_once(compilers: Compilers[str]) -> None:
    busy = keep_busy(compilers, NUM_THREADS)
    waiting = [compilers.submit(quick) for _ in range(3)]
    assert compilers.give_up(waiting[1])
    assert compilers.num_waiting == 2
    assert waiting[1].cancelled()
    let_go(busy)
    assert [waiting[place].result(WAIT_S) for place in (0, 2)] == ["quick", "quick"]


def test_threads_that_are_stuck_with_what_nobody_wants_are_replaced_up_to_a_limit(
    compilers: Compilers[str],
) -> None:
    busy = keep_busy(compilers, NUM_THREADS)
    late = compilers.submit(quick)
    assert not compilers.give_up(busy[0][1])
    assert late.result(WAIT_S) == "quick"
    for _, future in busy[1:]:
        compilers.give_up(future)
    more = keep_busy(compilers, MAX_STUCK)
    for _, future in more:
        compilers.give_up(future)
    waits = compilers.submit(quick)
    assert compilers.num_waiting == 1, "so many threads are enough"
    let_go(more[:1])
    assert waits.result(WAIT_S) == "quick"
    let_go([*busy, *more[1:]])


def test_closing_cancels_what_waits(compilers: Compilers[str]) -> None:
    busy = keep_busy(compilers, NUM_THREADS)
    waiting = compilers.submit(quick)
    compilers.close()
    with pytest.raises(CancelledError):
        waiting.result(WAIT_S)
    let_go(busy)
