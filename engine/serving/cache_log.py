"""The last changes of an engine's prefix cache, for readers of `GET /v1/cache/events`.

Changes are numbered from the engine's start. Only the last ones are kept; a reader that asks for older ones,
or from another start, is told everything that is cached.
"""

import asyncio
from collections import deque
from collections.abc import Iterable

from wire.cache import CacheEvent

MAX_KEPT_BLOCKS = 65_536


class CacheLog:
    """What is cached now, by name, and how it came to be. Belongs to one event loop."""

    def __init__(self, max_kept_blocks: int = MAX_KEPT_BLOCKS) -> None:
        self._max_kept_blocks = max_kept_blocks
        self._changed = asyncio.Event()
        self.restart(0)

    def restart(self, epoch: int) -> None:
        """Another engine process has started, with nothing cached."""
        self.epoch = epoch
        self.next_event = 0
        self._names: dict[str, None] = {}
        self._kept: deque[CacheEvent] = deque()
        self._num_kept_blocks = 0
        self._wake()

    def add(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            self._apply(event)
            self._kept.append(event)
            self._num_kept_blocks += len(event.names)
            self.next_event += 1
            while self._num_kept_blocks > self._max_kept_blocks:
                self._num_kept_blocks -= len(self._kept.popleft().names)
        self._wake()

    async def read(self, epoch: int | None, after: int, wait_s: float) -> tuple[CacheEvent, ...]:
        """What a reader does not know yet; waits for a change if it knows everything."""
        if self._is_up_to_date(epoch, after) and wait_s > 0:
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                return ()
        num_new = self.next_event - after
        if epoch == self.epoch and 0 <= num_new <= len(self._kept):
            return tuple(self._kept)[len(self._kept) - num_new :]
        return (CacheEvent(kind="cleared"), CacheEvent(kind="stored", names=tuple(self._names)))

    def _is_up_to_date(self, epoch: int | None, after: int) -> bool:
        return epoch == self.epoch and after == self.next_event

    def _apply(self, event: CacheEvent) -> None:
        match event.kind:
            case "stored":
                self._names |= dict.fromkeys(event.names)
            case "removed":
                for name in event.names:
                    self._names.pop(name, None)
            case "cleared":
                self._names.clear()

    def _wake(self) -> None:
        """Let those who wait now go on; those who come later wait anew."""
        self._changed.set()
        self._changed = asyncio.Event()
