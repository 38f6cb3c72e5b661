"""The compiled path of tokens that are nothing but text (src/module.cpp)."""

from collections.abc import Callable
from typing import final

SOURCES: str
"""The digest of what it was built from."""

@final
class Words:
    """What tokens look like; shared by all streams of a vocabulary."""

    def __new__(
        cls, lookup: Callable[[int], tuple[bytes, bytes | None]], to_json: Callable[[str], bytes], size: int
    ) -> Words:
        """`lookup` is asked once for each token: its bytes, and as JSON if it is whole characters.

        Ids from `size` on are left to Python.
        """

@final
class Outlet:
    """A client's connection: chunks of a body are written to it while neither flag is set."""

    is_paused: bool
    """Its buffers are full, or it is closed."""
    is_behind: bool
    """Something else has to be sent first."""

    def __new__(cls, write: Callable[[bytes], object], is_paused: bool = False) -> Outlet: ...

@final
class PlainStream:
    """One choice whose tokens are text and nothing else."""

    def __new__(
        cls,
        words: Words,
        *,
        choice: int,
        next_index: int,
        last_s: float,
        before: bytes,
        after: bytes,
        outlet: Outlet | None,
        put: Callable[[bytes], object] | None,
    ) -> PlainStream:
        """An event is the text of one part between `before` and `after`.

        `put` takes events that the outlet cannot; without it there are none, and the text is kept.
        """

    @property
    def num_tokens(self) -> int:
        """Taken here."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def next_index(self) -> int: ...
    @property
    def last_s(self) -> float:
        """When the last part came."""

    @property
    def pending(self) -> bytes:
        """Of a character that is not complete."""

    @property
    def text(self) -> str:
        """Where there are no events."""

    def stop(self) -> None:
        """The next part is not taken here any more."""

@final
class PlainStreams:
    """Those of one link, by the link's numbers."""

    def add(self, number: int, stream: PlainStream, /) -> None: ...
    def remove(self, number: int, /) -> None:
        """What it has taken leaves first."""

    def take(self, frame: bytes, now_s: float, /) -> bytes:
        """The parts that are not for these streams, as a frame; empty where there are none.

        A stream gets nothing more behind a part that is not plain: that has to be dealt with first.
        """

    def flush(self) -> list[float]:
        """Everything that was taken leaves; returns how long each part was waited for."""
