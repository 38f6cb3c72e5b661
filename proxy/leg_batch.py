"""A completion leg, and what it brings at once."""

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from proxy.errors import EngineFailure
from proxy.native.loading import PlainStream
from proxy.token_batch import TokenBatch


class LegBatch(msgspec.Struct, frozen=True):
    """The tokens of one read, or of one step, by choice."""

    parts: Mapping[int, TokenBatch] = msgspec.field(default_factory=dict)
    failure: EngineFailure | None = None
    """Why the stream ends after these tokens without an answer."""
    is_accepted: bool = False
    """Nothing but the engine's word that it has taken the request."""


TakeBatch = Callable[[LegBatch], bool]
"""Takes a batch at once; False when nothing more is wanted."""


class PlainSource(Protocol):
    """Whose tokens may be taken by a compiled stream for a while."""

    def begin_plain(self) -> PlainStream | None:
        """None: not now."""

    def end_plain(self, plain: PlainStream) -> None: ...


class CompletionLeg(Protocol):
    """The tokens of one completion stream; its reader knows the end."""

    async def next_batch(self, timeout_s: float | None) -> LegBatch:
        """At least one token or an end of a choice or of all; silence for `timeout_s` is a failure."""

    async def forward(self, take: TakeBatch, stall_s: float, plain: PlainSource | None = None) -> None:
        """Give every further batch to `take` until that returns False; silence is a failure.

        What `plain` begins may get tokens in place of `take`, which gets none until it is ended.
        """

    async def drain(self) -> None:
        """The last batch is in: leave the connection fit for others."""

    async def close(self) -> None:
        """Aborts what has not ended."""
