"""In-batch sharing: of waiting requests with one uncached prefix one goes first, the rest find it cached.

1. A request that is taken from the queue leads: it is about to compute what follows its cached prefix.
2. One that goes on with the same blocks follows: it is parked when it would be next.
3. When the leader's chunk is computed its followers return to the queue, where they match more than before.
   If the leader has more to compute it leads again, from there.

Two requests share an uncached prefix exactly if the same blocks are cached of both and the same blocks come
next, so it is enough to compare the prompts up to `num_shared_blocks` behind what is cached.
"""

from shared_scheduler.radix_tree import TOKEN_BYTES
from shared_scheduler.sequence import Sequence
from shared_scheduler.waiting_orders import Waiter

Probe = tuple[str, bytes]
"""Cache salt, and the prompt up to a point behind its cached prefix."""


class InBatchSharing:
    """Leaders and their followers."""

    def __init__(self, block_size: int, num_shared_blocks: int) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self._block_size = block_size
        self._num_shared_blocks = num_shared_blocks
        """Fewer blocks than this are not worth waiting for."""
        self._leaders: dict[Probe, Sequence] = {}
        self._probes: dict[Sequence, Probe] = {}
        self._keys: dict[Sequence, bytes] = {}
        """Of everybody who has left the queue and has not computed its prompt."""
        self._followers: dict[Sequence, dict[Waiter, None]] = {}
        self._parked: dict[Waiter, Sequence] = {}
        """Followers with their leaders."""

    def leads(self, waiter: Waiter) -> None:
        """It has been taken from the queue to be computed."""
        if waiter.watch is not None:
            self._keys[waiter.sequence] = waiter.watch.key
            self._lead(waiter.sequence, waiter.num_cached_blocks)

    def leads_on(self, sequence: Sequence) -> None:
        """A chunk of it is computed, and more is to come."""
        if sequence in self._keys:
            self._lead(sequence, sequence.cache.num_tokens // self._block_size)

    def leader_of(self, waiter: Waiter) -> Sequence | None:
        """Who computes what this one would have to compute."""
        if waiter.watch is None or not self._leaders:
            return None
        return self._leaders.get(self._probe(waiter.sequence, waiter.watch.key, waiter.num_cached_blocks))

    def is_parked(self, waiter: Waiter) -> bool:
        return waiter in self._parked

    def park(self, waiter: Waiter, leader: Sequence) -> None:
        self._parked[waiter] = leader
        self._followers.setdefault(leader, {})[waiter] = None

    def unpark(self, waiter: Waiter) -> None:
        """It leaves the queue."""
        del self._followers[self._parked.pop(waiter)][waiter]

    def take_followers(self, leader: Sequence) -> list[Waiter]:
        """Those who waited for its chunk, which is computed or will never be; they are parked no more."""
        probe = self._probes.pop(leader, None)
        if probe is None:
            return []
        del self._leaders[probe]
        followers = list(self._followers.pop(leader, ()))
        for waiter in followers:
            del self._parked[waiter]
        return followers

    def forget(self, sequence: Sequence) -> None:
        """It will compute no more of its prompt."""
        self._keys.pop(sequence, None)

    def check_invariants(self) -> None:
        assert {sequence: probe for probe, sequence in self._leaders.items()} == self._probes
        assert self._probes.keys() <= self._keys.keys()
        assert self._followers.keys() <= self._probes.keys(), "somebody waits for nobody"
        assert {w: leader for leader, them in self._followers.items() for w in them} == self._parked

    def _lead(self, sequence: Sequence, num_cached_blocks: int) -> None:
        key = self._keys[sequence]
        if (num_cached_blocks + self._num_shared_blocks) * self._block_bytes > len(key):
            return
        probe = self._probe(sequence, key, num_cached_blocks)
        if probe not in self._leaders:
            self._leaders[probe] = sequence
            self._probes[sequence] = probe

    def _probe(self, sequence: Sequence, key: bytes, num_cached_blocks: int) -> Probe:
        return sequence.cache_salt, key[: (num_cached_blocks + self._num_shared_blocks) * self._block_bytes]
