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


async def failing_group() -> None:
    """What an attempt at two engines does when one of them fails."""

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError

    with contextlib.suppress(BaseExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())


async def test_work_that_went_on_after_a_failed_group_ends_with_the_error() -> None:
    async def go_on_after_a_failure() -> None:
        await failing_group()
        asyncio.get_running_loop().call_soon(work.interrupt, Late())
        await asyncio.Event().wait()

    work = Interruption()
    with pytest.raises(Late), work:
        await go_on_after_a_failure()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_an_error_that_a_failing_group_swallowed_is_found_by_a_check() -> None:
    async def fail() -> None:
        raise ValueError

    async def is_interrupted_while_the_group_ends() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            work.interrupt(Late())

    async def go_on_after_a_failure() -> None:
        with contextlib.suppress(BaseExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(is_interrupted_while_the_group_ends())
                group.create_task(fail())
        work.check()

    work = Interruption()
    with pytest.raises(Late), work:
        await go_on_after_a_failure()


async def test_a_cancelled_task_stays_cancelled() -> None:
    async def uninterrupted() -> None:
        with Interruption():
            await asyncio.Event().wait()

    task = asyncio.create_task(uninterrupted())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
