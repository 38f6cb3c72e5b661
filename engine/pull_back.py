"""A prompt engine fetches the blocks of an earlier turn's answer from the completion engine that decoded it.

1. asked      enough of the prompt is not cached here: the completion engine is asked for the rest
2. pulling    it has enough: blocks were taken for it, and are read
3. imported   they are in our cache, and the sequence is scheduled behind them

The sequence waits no longer than `wait_s`. Whatever goes wrong, it is scheduled and computes what is missing;
blocks that a read may still write to go back when nothing can.
"""

import uuid
from collections.abc import Sequence as Items
from dataclasses import dataclass

from engine.handover_role import flatten_counters
from kv_transfer.events import Arrived, Failed, Offered, Reclaimable
from kv_transfer.messages import MAX_PREFIX_TOKENS, Prefix
from kv_transfer.sink import HandoverSink
from shared_scheduler import Import, Scheduler, Sequence
from wire.services import CompletionEngineAddress


@dataclass(frozen=True, slots=True)
class PullBackLimits:
    """When fetching is worth the wait."""

    min_tokens: int
    """Fewer are computed."""
    wait_s: float


@dataclass(slots=True)
class _Visit:
    """One sequence's errand; it goes on without the sequence once that has been scheduled."""

    visit_id: str
    sequence: Sequence | None
    token_ids: bytes
    num_cached_tokens: int
    """Here, when we asked."""
    deadline_s: float
    wanted: Import | None = None


class PullBack:
    """Called by the engine thread only."""

    def __init__(self, scheduler: Scheduler, sink: HandoverSink, limits: PullBackLimits) -> None:
        self._scheduler = scheduler
        self._sink = sink
        self._limits = limits
        self._visits: dict[str, _Visit] = {}
        self._num_tokens = 0

    def begin(self, sequence: Sequence, previous: CompletionEngineAddress, now_s: float) -> bool:
        """False: not worth it, schedule it now. True: `poll` hands it back when it is to be scheduled."""
        if self._scheduler.cache is None or self._scheduler.num_free_slots is not None:
            return False  # nothing is kept here, or blocks alone are of no use
        block_size = self._scheduler.config.block_size
        # The last token is always computed: its logits are wanted.
        num_blocks = min(sequence.num_tokens - 1, MAX_PREFIX_TOKENS) // block_size
        tokens = sequence.token_array()[: num_blocks * block_size]
        own = self._scheduler.lend(tokens.tolist(), sequence.cache_salt)
        num_cached = 0 if own is None else own.num_tokens
        if own is not None:
            self._scheduler.give_back(own)
        if tokens.size - num_cached < self._limits.min_tokens:
            return False
        visit_id = f"pull-back-{uuid.uuid4().hex}"
        token_ids = tokens.astype("<i4").tobytes()
        visit = _Visit(visit_id, sequence, token_ids, num_cached, now_s + self._limits.wait_s)
        self._visits[visit_id] = visit
        prefix = Prefix(token_ids, num_cached, sequence.cache_salt)
        self._sink.request(visit_id, previous, self._limits.wait_s, prefix=prefix)
        return True

    def cancel(self, sequence: Sequence) -> bool:
        """Hand a sequence back at once; False if it is not here."""
        for visit in self._visits.values():
            if visit.sequence is sequence:
                self._give_up(visit)
                return True
        return False

    def poll(self, now_s: float) -> Items[Sequence]:
        """The sequences that are to be scheduled now."""
        ready: list[Sequence | None] = []
        for event in self._sink.events():
            visit = self._visits.get(event.handover_id)
            if visit is None:
                continue
            match event:
                case Offered():
                    if not self._pull(visit, event):
                        ready.append(self._give_up(visit))
                case Arrived():
                    ready.append(self._arrived(visit))
                case Failed():
                    ready.append(self._part(visit))
                    if event.blocks_safe:
                        self._forget(visit)
                case Reclaimable():
                    self._forget(visit)
        late = [v for v in self._visits.values() if v.sequence is not None and v.deadline_s <= now_s]
        ready += [self._give_up(visit) for visit in late]
        return [sequence for sequence in ready if sequence is not None]

    def counters(self) -> dict[str, float]:
        counters = {f"pull_back_{name}": n for name, n in flatten_counters(self._sink.stats()).items()}
        return counters | {"pull_back_tokens": float(self._num_tokens)}

    def close(self) -> None:
        self._sink.close()

    def _pull(self, visit: _Visit, offered: Offered) -> bool:
        """False if it is too little, or if there is no room for it."""
        block_size = self._scheduler.config.block_size
        num_blocks, rest = divmod(offered.num_tokens, block_size)
        if visit.sequence is None or rest or offered.num_tokens < self._limits.min_tokens:
            return False
        first_block = visit.num_cached_tokens // block_size
        tokens, salt = visit.sequence.token_ids, visit.sequence.cache_salt
        if (first_block + num_blocks) * block_size > len(visit.token_ids) // 4:
            return False
        visit.wanted = self._scheduler.reserve_import(tokens, salt, first_block, num_blocks)
        if visit.wanted is None:
            return False
        self._sink.pull(visit.visit_id, visit.wanted.block_ids)
        return True

    def _arrived(self, visit: _Visit) -> Sequence | None:
        assert visit.wanted is not None, "nothing arrives that was not pulled"
        self._scheduler.commit_import(visit.wanted)
        self._num_tokens += visit.wanted.block_ids.size * self._scheduler.config.block_size
        del self._visits[visit.visit_id]
        return self._part(visit)

    def _give_up(self, visit: _Visit) -> Sequence | None:
        """Let go of the blocks; `Reclaimable` says when no read can touch them."""
        self._sink.abandon(visit.visit_id)
        return self._part(visit)

    def _part(self, visit: _Visit) -> Sequence | None:
        sequence, visit.sequence = visit.sequence, None
        return sequence

    def _forget(self, visit: _Visit) -> None:
        del self._visits[visit.visit_id]
        if visit.wanted is not None:
            self._scheduler.drop_import(visit.wanted)
