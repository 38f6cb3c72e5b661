"""What sequences find in the prefix cache and what they leave there.

A key ends before the first image: its pads say nothing of what it shows.
"""

from dataclasses import dataclass

import numpy as np

from shared_scheduler.block_manager import BlockManager
from shared_scheduler.config import SchedulerConfig
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

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self._block_size = config.block_size
        self._image_pad = config.image_pad_token_id
        self._image_start = config.image_start_token_id
        self.cache: PrefixCache | None = None
        # Blocks alone do not bring back a sequence whose model keeps a state beside them.
        if config.prefix_cache and config.num_state_slots is None:
            self.cache = PrefixCache(blocks, config.block_size, has_events=config.cache_events)
        self._num_query_tokens = 0
        self._num_hit_tokens = 0
        self._last: tuple[Sequence, int, int, Hit] | None = None

    def find(self, sequence: Sequence, num_tokens: int) -> Hit:
        """The longest cached prefix of a sequence within its first `num_tokens` tokens."""
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

    def _num_blocks(self, key: bytes) -> int:
        return len(key) // (self._block_size * 4)

    def _before_image(self, tokens: Int32Array) -> int:
        pads = tokens == self._image_pad
        first = int(pads.argmax()) if pads.any() else tokens.size
        return first - (0 < first < tokens.size and tokens[first - 1] == self._image_start)
