"""The digests of offers, computed between a source's turns while their prompts are still being computed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kv_transfer.digests import SLICE_BYTES, TokenDigests, state_digest, tokens_per_digest, whole_sets
from kv_transfer.layout import BlockIds, Region
from kv_transfer.offers import Announcement, Offer


@dataclass(slots=True)
class _Job:
    tokens: TokenDigests
    block_ids: BlockIds
    """Of what is computed."""
    attempt: int
    offer: Offer | None = None
    is_unwanted: bool = False

    @property
    def has_work(self) -> bool:
        return not self.is_unwanted and not self.tokens.is_done(self.block_ids)


class OfferDigests:
    """What is announced is hashed at once, so that an offer waits for its last chunk only."""

    def __init__(self, regions: Sequence[Region], block_size: int) -> None:
        self._regions = tuple(regions)
        self._kv = whole_sets(regions)[0]
        self._block_size = block_size
        self._jobs: dict[str, _Job] = {}

    @property
    def is_busy(self) -> bool:
        return any(job.offer is not None or job.has_work for job in self._jobs.values())

    def announce(self, announcement: Announcement, block_ids: BlockIds) -> None:
        self._job(announcement, block_ids)

    def offer(self, offer: Offer, block_ids: BlockIds) -> None:
        """`work` returns it when its digests are known."""
        self._job(offer, block_ids).offer = offer

    def withdraw(self, handover_id: str) -> None:
        """One that was offered still comes out of `work`, whose receiver knows that it ended."""
        job = self._jobs.get(handover_id)
        if job is None:
            return
        job.is_unwanted = True
        if job.offer is None:
            del self._jobs[handover_id]

    def work(self) -> list[tuple[Offer, BlockIds, bytes]]:
        """Do a slice; the offers that are ready now."""
        num_bytes = 0
        ready = []
        for handover_id, job in list(self._jobs.items()):
            if job.has_work and num_bytes < SLICE_BYTES:
                num_bytes += job.tokens.advance(job.block_ids, SLICE_BYTES - num_bytes)
            if job.offer is not None and not job.has_work:
                del self._jobs[handover_id]
                state = state_digest(self._regions, job.offer.state_slot)
                ready.append((job.offer, job.block_ids, job.tokens.found + state))
        return ready

    def _job(self, told: Announcement | Offer, block_ids: BlockIds) -> _Job:
        job = self._jobs.get(told.handover_id)
        if job is None or not _goes_on(job, told.attempt, block_ids):
            group = tokens_per_digest(told.num_tokens, self._block_size)
            tokens = TokenDigests(self._kv, self._block_size, num_tokens=told.num_tokens, group=group)
            job = self._jobs[told.handover_id] = _Job(tokens, block_ids, told.attempt)
        job.block_ids = block_ids
        return job


def _goes_on(job: _Job, attempt: int, block_ids: BlockIds) -> bool:
    """False where the prompt was computed once more."""
    return job.attempt == attempt and np.array_equal(block_ids[: job.block_ids.size], job.block_ids)
