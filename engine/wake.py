"""Wakes the engine loop from another thread."""

import os
from contextlib import suppress


class WakePipe:
    """A self-pipe: `wake` may be called from any thread; the loop polls `read_fd` and calls `clear`."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)

    def wake(self) -> None:
        with suppress(BlockingIOError):  # a full pipe has woken the loop often enough
            os.write(self._write_fd, b"\0")

    def clear(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self.read_fd, 4096):
                pass
