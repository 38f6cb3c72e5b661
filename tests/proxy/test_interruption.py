"""What ends a request from outside ends its work with the right error, and nothing behind it."""

import asyncio
import contextlib
from collections.abc import Awaitable

import pytest

from proxy.interruption import Interruption


class Late(Exception):
    pass


async def interrupted(doing: Awaitable[object], *errors: Exception) -> None:
    """Work to which these errors happen in the next turn of the event loop."""
    with Interruption() as work:
        for error in errors:
            asyncio.get_running_loop().call_soon(work.interrupt, error)
        await doing


async def test_the_first_error_ends_the_work() -> None:
    with pytest.raises(Late, match="first"):
        await interrupted(asyncio.Event().wait(), Late("first"), Late("second"))
    await asyncio.sleep(0)  # nothing of it is left in the task


async def test_an_error_of_the_work_gives_way_to_what_ended_it() -> None:
    async def fail_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError

    with pytest.raises(Late):
        await interrupted(fail_when_cancelled(), Late())


async def test_work_that_is_done_is_not_interrupted() -> None:
    with Interruption() as work:
        pass
    work.interrupt(Late())
    await asyncio.sleep(0)


async def test_work_that_finishes_all_the_same_stays_finished() -> None:
    async def finish_when_cancelled() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    await interrupted(finish_when_cancelled(), Late())
    await asyncio.sleep(0)


async def test_a_cancelled_task_stays_cancelled() -> None:
    task = asyncio.create_task(interrupted(asyncio.Event().wait(), Late()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
