"""What sequences find in the prefix cache and what they leave there.

A key ends before the first image: its pads say nothing of what it shows.
"""

from dataclasses import dataclass

import numpy as np

from shared_scheduler.block_manager import BlockManager
from shared_scheduler.config import EngineType, SchedulerConfig
from shared_scheduler.prefix_cache import NO_HIT, Hit, PrefixCache
from shared_scheduler.radix_tree import key_of
from shared_scheduler.rows import Int32Array
from shared_scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Running totals and sizes of one prefix cache; all 0 without one."""

    num_query_tokens: int = 0
    """Tokens of sequences when they were first admitted."""
    num_hit_tokens: int = 0
    """Of these, those that were found cached."""
    num_cached_blocks: int = 0
    """Blocks the cache owns, in use or not."""
    num_evicted_blocks: int = 0


class Reuse:
    """The prefix cache as sequences see it; finds nothing and keeps nothing when it is switched off."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, states: BlockManager | None) -> None:
        self._block_size = config.block_size
        self._image_pad = config.image_pad_token_id
        self._image_start = config.image_start_token_id
        self.cache: PrefixCache | None = None
        if config.engine_type is EngineType.COMPLETION:
            states = None  # they come with the hand-over
        self._states = states
        self._snapshot_tokens = config.state_snapshot_blocks * config.block_size
        self._keeps_states = states is not None and config.chunked_prefill
        if config.prefix_cache:
            self.cache = PrefixCache(blocks, config.block_size, states, has_events=config.cache_events)
        self._num_query_tokens = 0
        self._num_hit_tokens = 0
        self._last: tuple[Sequence, int, int, Hit] | None = None

    def find_to_compute(self, sequence: Sequence) -> Hit:
        """Where the computation of a sequence may start: its last token is always computed.

        With states it starts from a copy of one, for which another slot must be free.
        """
        if sequence.needs_whole_prompt:
            return NO_HIT
        num_tokens = sequence.num_tokens - 1
        if self.cache is None or self._states is None:
            return self.find(sequence, num_tokens)
        hit = self.cache.match_with_state(self.key(sequence, num_tokens), sequence.cache_salt)
        return hit if self._states.num_free >= self.num_slots_for(hit) else NO_HIT

    def num_slots_for(self, hit: Hit) -> int:
        """Free slots that a sequence takes which starts from `hit`: its own, and a kept state's meanwhile."""
        if self._states is None or not hit.state_slot:
            return 1
        return 1 + (self._states.count(hit.state_slot) == 0)

    def next_snapshot(self, sequence: Sequence, start: int) -> int | None:
        """The first position from `start` on, within a prompt, at which its state is to be kept."""
        if self.cache is None or not self._keeps_states:
            return None
        last = self._last_full(sequence)
        regular = -(-start // self._snapshot_tokens) * self._snapshot_tokens
        return min(regular, last) if start <= last else None

    def keep_state(self, sequence: Sequence) -> int | None:
        """The slot into which the sequence's state is to be copied now, if it is to be kept."""
        position = sequence.cache.num_tokens
        is_due = position % self._snapshot_tokens == 0 or position == self._last_full(sequence)
        if self.cache is None or not (self._keeps_states and is_due and position):
            return None
        key = self.key(sequence, position)
        if self._num_blocks(key) * self._block_size < position:
            return None  # an image is in the way
        return self.cache.keep_state(key, sequence.cache_salt)

    def find(self, sequence: Sequence, num_tokens: int) -> Hit:
        """The longest prefix of a sequence's first `num_tokens` tokens whose blocks are cached."""
        cache = self.cache
        if cache is None:
            return NO_HIT
        if self._last is not None:
            asked, limit, version, hit = self._last
            if asked is sequence and limit == num_tokens and version == cache.version:
                return hit
        hit = cache.match(self.key(sequence, num_tokens), sequence.cache_salt)
        self._last = (sequence, num_tokens, cache.version, hit)
        return hit

    def use(self, sequence: Sequence, hit: Hit) -> None:
        """A sequence is admitted with what was found for it."""
        if self.cache is None:
            return
        self.cache.pin(hit)
        ledger = sequence.cache
        ledger.set_num_tokens(hit.num_blocks * self._block_size)
        if not ledger.was_admitted:
            ledger.was_admitted = True
            ledger.hit_tokens = ledger.num_tokens
            self._num_query_tokens += sequence.num_tokens
            self._num_hit_tokens += ledger.hit_tokens

    def store(self, sequence: Sequence, table: Int32Array, *, may_swap: bool) -> Int32Array:
        """Keep what is computed of a sequence; returns its table from now on (`PrefixCache.insert`)."""
        if self.cache is None or sequence.cache.swa_valid_start:
            return table  # its first blocks hold nothing
        key = self.key(sequence, sequence.cache.num_tokens)
        num_blocks = self._num_blocks(key)
        if not num_blocks:
            return table
        stored = self.cache.insert(key, sequence.cache_salt, table[:num_blocks], may_swap=may_swap)
        return np.concatenate([stored, table[num_blocks:]])

    def key(self, sequence: Sequence, num_tokens: int) -> bytes:
        """The key of the full blocks among a sequence's first `num_tokens` tokens."""
        tokens = sequence.stored_tokens(0, num_tokens)
        if self._image_pad is not None:
            tokens = tokens[: self._before_image(tokens)]
        return key_of(tokens, tokens.size // self._block_size, self._block_size)

    def stats(self) -> CacheStats:
        if self.cache is None:
            return CacheStats()
        return CacheStats(
            self._num_query_tokens, self._num_hit_tokens, self.cache.num_blocks, self.cache.num_evicted
        )

    def _last_full(self, sequence: Sequence) -> int:
        """End of the last full block that leaves a token to compute."""
        return (sequence.num_tokens - 1) // self._block_size * self._block_size

    def _num_blocks(self, key: bytes) -> int:
        return len(key) // (self._block_size * 4)

    def _before_image(self, tokens: Int32Array) -> int:
        pads = tokens == self._image_pad
        first = int(pads.argmax()) if pads.any() else tokens.size
        return first - (0 < first < tokens.size and tokens[first - 1] == self._image_start)
