"""Moves streams off engines that drain, early enough that none is cut and late enough that short ones end.

1. staying   a stream is decoded by an engine; it is known here while it is
2. draining  the engine's service has said that it leaves, and when
3. leave     a stream that may take too long for that, and that other engines can take, is told to leave: its
             next token is the last one from there, and `migration` lets it go on elsewhere

Streams are told a few at a time, the longest first: each has to be prefilled again, and waits for those
before it. Where nobody else can take it a stream stays, until somebody can, or it is cut and migrates then.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from proxy.fleet import Engine, EngineStart

TICK_S = 0.1
MOVING_SHARE = 0.5
"""Of the time that is left: so long the moves may take, and what takes longer than that moves."""


class Staying(Protocol):
    """One choice that an engine decodes."""

    num_tokens_at_end: int
    """Of prompt and completion together, at most."""

    @property
    def is_staying(self) -> bool:
        """It has neither ended nor been told to leave."""

    @property
    def may_take_s(self) -> float:
        """How long it goes on, at most and at its pace so far; 0 where that is not known yet."""

    def leave(self) -> None: ...

    def stay(self) -> None: ...


class Fleet(Protocol):
    def leaving(self) -> Mapping[EngineStart, float]:
        """How long engines that drain will stay, in seconds."""

    def longest(self) -> int:
        """The tokens of prompt and completion together that some route takes now."""

    async def wait_for_change(self) -> None: ...


def to_move(staying: Sequence[Staying], left_s: float) -> list[Staying]:
    """Those that are to leave in this tick, of an engine that stays `left_s`."""
    share_s = MOVING_SHARE * left_s
    too_long = [choice for choice in staying if choice.is_staying and choice.may_take_s > share_s]
    num_now = math.ceil(len(too_long) * TICK_S / max(share_s, TICK_S))
    return sorted(too_long, key=lambda choice: choice.may_take_s, reverse=True)[:num_now]


class Departures:
    """Knows who is decoded where; `run` until cancelled."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._staying: defaultdict[EngineStart, set[Staying]] = defaultdict(set)

    def arrive(self, engine: Engine, choices: Sequence[Staying]) -> None:
        """These choices are decoded by this engine, until they `depart`."""
        for choice in choices:
            choice.stay()
        self._staying[engine.start].update(choices)

    def depart(self, engine: Engine, choices: Sequence[Staying]) -> None:
        here = self._staying[engine.start]
        here.difference_update(choices)
        if not here:
            del self._staying[engine.start]

    async def run(self) -> None:
        while True:
            leaving = self._fleet.leaving()
            if self._staying.keys() & leaving.keys():
                for start, left_s in leaving.items():
                    self._tell(start, left_s)
                await asyncio.sleep(TICK_S)
            else:
                await self._fleet.wait_for_change()

    def _tell(self, start: EngineStart, left_s: float) -> None:
        longest = self._fleet.longest()
        staying = self._staying.get(start, ())
        for choice in to_move([one for one in staying if one.num_tokens_at_end <= longest], left_s):
            choice.leave()
