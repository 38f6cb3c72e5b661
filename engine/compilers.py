"""Threads that compile grammars, and what waits for them.

1. waiting    in order; given up, it is gone
2. running    nothing can interrupt it; given up, its thread counts as stuck and is replaced, up to MAX_STUCK
3. done       the future has its result; a thread without work ends

The threads end with the process, whatever they are at.
"""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock, Thread
from typing import Generic, TypeVar

NUM_THREADS = 2
MAX_STUCK = 2
"""Threads that compile what nobody wants any more, beside which others are started."""

ResultT = TypeVar("ResultT")


class Compilers(Generic[ResultT]):
    """Owns the threads and the queue before them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: OrderedDict[Future[ResultT], Callable[[], ResultT]] = OrderedDict()
        self._stuck: set[Future[ResultT]] = set()
        self._num_threads = 0
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, work: Callable[[], ResultT]) -> Future[ResultT]:
        future: Future[ResultT] = Future()
        with self._lock:
            self._waiting[future] = work
            self._start_thread()
        return future

    def give_up(self, future: Future[ResultT]) -> bool:
        """Nobody waits for it any more; True if it has not begun and never will."""
        with self._lock:
            if self._waiting.pop(future, None) is not None:
                return future.cancel()
            if not future.done():
                self._stuck.add(future)
                self._start_thread()
            return False

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
        for future in waiting:
            future.cancel()

    @property
    def _max_threads(self) -> int:
        return NUM_THREADS + min(len(self._stuck), MAX_STUCK)

    def _start_thread(self) -> None:
        """With the lock held."""
        if self._waiting and self._num_threads < self._max_threads:
            self._num_threads += 1
            Thread(target=self._work, name="grammar", daemon=True).start()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            future, work = taken
            try:
                result = work()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            with self._lock:
                self._stuck.discard(future)

    def _take(self) -> tuple[Future[ResultT], Callable[[], ResultT]] | None:
        """The next work; None where this thread has to end."""
        with self._lock:
            if self._is_closed or not self._waiting or self._num_threads > self._max_threads:
                self._num_threads -= 1
                return None
            future, work = self._waiting.popitem(last=False)
            future.set_running_or_notify_cancel()
            return future, work
