"""One completion stream of a token link: what is brought to it, and who waits for that."""

import asyncio
from collections.abc import Callable, Coroutine

from proxy.engine_waits import EngineWaits, too_slow
from proxy.errors import (
    EngineFailure,
    EngineTooSlow,
    failure_from_event,
    failure_from_finish,
    refused_at_once,
)
from proxy.fleet import Engine
from proxy.leg_batch import LegBatch, PlainSource, TakeBatch
from proxy.native.loading import PlainStream, PlainStreams
from proxy.token_batch import TokenBatch
from wire.token_link import StreamPart


class LinkedLeg:
    """One stream of a link; see `proxy.legs.CompletionLeg`."""

    def __init__(
        self,
        engine: Engine,
        waits: EngineWaits,
        leave: Callable[[bool], None],
        number: int = 0,
        streams: PlainStreams | None = None,
    ) -> None:
        """`leave` gives the stream up, or says that it is over.

        `streams`: those of the link that are compiled; `number`: of this stream there.
        """
        self.engine = engine
        self.is_accepted = False
        self.has_begun = False
        """Something beside its acceptance has come."""
        self._waits = waits
        self._leave = leave
        self._early: list[LegBatch] = []
        self._take_batch: TakeBatch | None = None
        self._number = number
        self._streams = streams
        self._source: PlainSource | None = None
        self._plain: PlainStream | None = None
        """Takes the tokens now."""
        self._waiting: asyncio.Future[None] | None = None
        self._heard_s = 0.0
        self._stall_s: float | None = None

    async def accepted(self, timeout_s: float | None) -> None:
        """Return when the engine has taken the request; raises its refusal."""
        while not self.is_accepted:
            if self._early and self._early[0].failure is not None:
                raise self._early[0].failure
            await self._something(timeout_s)

    async def next_batch(self, timeout_s: float | None) -> LegBatch:
        """At least one token or an end of a choice or of all; silence for `timeout_s` is a failure."""
        if not self._early:
            await self._something(timeout_s)
        return self._early.pop(0)

    async def forward(self, take: TakeBatch, stall_s: float, plain: PlainSource | None = None) -> None:
        """Give every batch to `take` until that returns False; raises what it raises."""
        for batch in self._early:
            if not take(batch):
                return
        self._early.clear()
        self._take_batch, self._stall_s, self._source = take, stall_s, plain
        self._heard_s = asyncio.get_running_loop().time()
        try:
            await self._something(None)
        except EngineTooSlow:
            raise too_slow(self.engine, stall_s) from None
        finally:
            self._end_plain()
            self._take_batch = self._source = None

    async def drain(self) -> None:
        """The last batch is in: nothing follows."""
        self._leave(True)

    async def close(self) -> None:
        self._leave(False)

    def take(self, batch: LegBatch, now_s: float) -> None:
        """What the link has brought; never waits."""
        self._end_plain()
        if batch.is_accepted:
            self.is_accepted = True
            self._wake()
            return
        self.has_begun = True
        if self._take_batch is None:
            self._early.append(batch)
        else:
            self._heard_s = now_s
            try:
                if self._take_batch(batch):
                    return
                self._take_batch = None
            except Exception as error:  # belongs to whoever waits in `forward`
                self._take_batch = None
                self._wake(error)
                return
        self._wake()

    def begin_plain(self) -> None:
        """Let the next tokens be taken by a compiled stream, if they may; nothing waits to be taken now."""
        if self._plain is None and self._source is not None and self._streams is not None:
            self._plain = self._source.begin_plain()
            if self._plain is not None:
                self._streams.add(self._number, self._plain)

    def _end_plain(self) -> None:
        plain, self._plain = self._plain, None
        if plain is None:
            return
        assert self._streams is not None
        assert self._source is not None
        self._streams.remove(self._number)
        self._heard_s = max(self._heard_s, plain.last_s)
        self._source.end_plain(plain)

    def check_stall(self, now_s: float) -> None:
        stall_s = self._stall_s
        if self._plain is not None:
            self._heard_s = max(self._heard_s, self._plain.last_s)
        if self._take_batch is not None and stall_s is not None and now_s - self._heard_s > stall_s:
            self._wake(too_slow(self.engine, stall_s))

    def _something(self, timeout_s: float | None) -> Coroutine[None, None, None]:
        self._waiting = asyncio.get_running_loop().create_future()
        return self._waits.for_future(timeout_s, self.engine, self._waiting)

    def _wake(self, error: Exception | None = None) -> None:
        if self._waiting is None or self._waiting.done():
            return
        if error is None:
            self._waiting.set_result(None)
        else:
            self._waiting.set_exception(error)


def batch_of(leg: LinkedLeg, part: StreamPart) -> LegBatch:
    """What a part of this leg's stream means."""
    reason = part.finish_reason
    end = reason if reason == "stop" or reason == "length" else None
    parts = {}
    if part.token_ids or end is not None:
        parts[part.choice] = TokenBatch(part.tokens(), end, part.num_cached_tokens, part.prompt_logprobs)
    failure: EngineFailure | None = None
    if part.error is not None:
        failure = failure_from_event(leg.engine.role, part.error, part.error_status)
        if not leg.is_accepted:
            failure = refused_at_once(leg.engine.role, failure.status, failure.error, {})
    elif reason is not None and end is None:
        failure = failure_from_finish(leg.engine.role, reason)
    return LegBatch(parts, failure, part.is_accepted)
