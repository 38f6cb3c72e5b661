"""A completion leg, and what it brings at once."""

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from proxy.errors import EngineFailure
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


class CompletionLeg(Protocol):
    """The tokens of one completion stream; its reader knows the end."""

    async def next_batch(self, timeout_s: float | None) -> LegBatch:
        """At least one token or an end of a choice or of all; silence for `timeout_s` is a failure."""

    async def forward(self, take: TakeBatch, stall_s: float) -> None:
        """Give every further batch to `take` until that returns False; silence is a failure."""

    async def drain(self) -> None:
        """The last batch is in: leave the connection fit for others."""

    async def close(self) -> None:
        """Aborts what has not ended."""
