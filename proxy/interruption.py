"""Lets what happens elsewhere end the current task's work: its client leaves, its time is up.

A task of its own for the work, and another one that waits for the client, would cost a small request a third
of its time.
"""

import asyncio
from types import TracebackType
from typing import Self


class Interruption:
    """A context around the work of one task; the first error that it is told ends the work and is raised."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._num_cancels_before = task.cancelling()
        self._error: Exception | None = None
        self._is_over = False

    def interrupt(self, error: Exception) -> None:
        """To be called by callbacks of the event loop; does nothing once the work is done."""
        if self._error is None and not self._is_over:
            self._error = error
            self._task.cancel()

    def check(self) -> None:
        """Raises CancelledError where the work is to end: a task group that was about to raise its child's
        error has swallowed the one before."""
        if self._error is not None:
            raise asyncio.CancelledError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over = True
        if self._error is None:
            return
        # Not all are ours: a task group that ends by its child's error leaves its own behind (Python 3.11).
        while self._task.cancelling() > self._num_cancels_before:
            self._task.uncancel()
        if kind is not None:  # work that was complete all the same stays so
            raised, self._error = self._error, None
            try:
                raise raised from None
            finally:
                # What is raised knows this frame and those of its callers: nobody but the garbage collector
                # would free what a client has not read.
                del raised, error, traceback
