import asyncio

from engine.serving.cache_log import CacheLog
from wire.cache import CacheEvent


def stored(*names: str) -> CacheEvent:
    return CacheEvent(kind="stored", names=names)


def removed(*names: str) -> CacheEvent:
    return CacheEvent(kind="removed", names=names)


CLEARED = CacheEvent(kind="cleared")


def filled(*events: CacheEvent, **options: int) -> CacheLog:
    log = CacheLog(**options)
    log.restart(7)
    log.add(events)
    return log


async def test_a_new_reader_is_told_what_is_cached_now() -> None:
    log = filled(stored("a", "b"), stored("c"), removed("b"))
    assert await log.read(None, 0, 0.0) == (CLEARED, stored("a", "c"))
    assert log.next_event == 3


async def test_a_reader_is_told_what_came_since() -> None:
    log = filled(stored("a", "b"), stored("c"), removed("b"))
    assert await log.read(7, 1, 0.0) == (stored("c"), removed("b"))
    assert await log.read(7, 3, 0.0) == ()


async def test_a_reader_of_another_start_is_told_everything() -> None:
    log = filled(stored("a"))
    log.restart(8)
    log.add([stored("z")])
    assert await log.read(7, 1, 0.0) == (CLEARED, stored("z"))


async def test_a_reader_that_fell_behind_is_told_everything() -> None:
    log = filled(stored("a", "b"), stored("c"), removed("b"), max_kept_blocks=2)
    assert await log.read(7, 0, 0.0) == (CLEARED, stored("a", "c"))
    assert await log.read(7, 1, 0.0) == (stored("c"), removed("b"))
    assert await log.read(7, 9, 0.0) == (CLEARED, stored("a", "c"))


async def test_a_reader_that_knows_everything_waits_for_the_next_change() -> None:
    log = filled(stored("a"))
    reading = asyncio.create_task(log.read(7, 1, 30.0))
    await asyncio.sleep(0)
    assert not reading.done()
    log.add([stored("b")])
    assert await reading == (stored("b"),)
    assert await log.read(7, 2, 0.001) == ()
