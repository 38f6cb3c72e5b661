"""Whether the pool has room for what a newcomer, and all who are here, are expected to generate."""

import math

import numpy as np

from shared_scheduler.config import SchedulerConfig
from shared_scheduler.forecast import Float64Array, PoolForecast
from shared_scheduler.holdings import Holdings
from shared_scheduler.new_token_ratio import NewTokenRatio
from shared_scheduler.prefix_cache import Hit
from shared_scheduler.sequence import Sequence
from shared_scheduler.status import SequenceStatus

CAUTION = 2.0
"""Standard deviations of everybody's output together that are kept free."""


class AdmissionEstimate:
    """Keeps a sequence waiting if, with it, the pool is expected to overflow later on."""

    def __init__(self, config: SchedulerConfig, holdings: Holdings) -> None:
        self.is_on = config.admission_estimate
        self.ratio = NewTokenRatio(config.new_token_ratio_floor, config.new_token_ratio_decay_steps)
        self._config = config
        self._holdings = holdings

    def forecast(self) -> PoolForecast:
        """Of all sequences that hold blocks, each going on from now."""
        rows, blocks = self._holdings.rows, self._holdings.blocks
        taken = rows.taken()
        num_tokens = rows.num_tokens[taken]
        num_allowed = np.maximum(rows.end_length[taken] - 1 - num_tokens, 0)  # the last token is not stored
        num_steps = num_allowed * self.ratio.value + self.ratio.spread * _different_lives(taken.size)
        return PoolForecast(
            num_tokens,
            rows.num_blocks[taken],
            np.ceil(np.clip(num_steps, 0, num_allowed)).astype(np.int64),
            block_size=self._config.block_size,
            num_used=blocks.num_usable - blocks.num_free,
        )

    def fits_all(self) -> bool:
        """Do all who hold blocks fit to their expected ends?"""
        return self.forecast().peak() <= self._holdings.blocks.num_usable

    def fits(self, newcomer: Sequence, hit: Hit) -> bool:
        """With one more, that is to start behind a cached prefix? True where nobody else holds blocks."""
        if not self._holdings.rows.num_taken:
            return True
        num_tokens = newcomer.num_tokens
        end = min(newcomer.num_prompt_tokens + newcomer.sampling.max_tokens - 1, self._config.max_model_len)
        num_steps = math.ceil(max(end - num_tokens, 0) * self.ratio.value)
        num_shared = hit.num_blocks - self._holdings.blocks.num_unused(hit.block_ids)
        num_blocks = newcomer.num_blocks_needed() - num_shared
        num_own_tokens = num_tokens - num_shared * self._config.block_size
        peak = self.forecast().peak_with(num_own_tokens, num_blocks, num_steps)
        return peak + self._headroom() <= self._holdings.blocks.num_usable

    def _headroom(self) -> float:
        """Blocks for the chance that many go on for longer than expected at the same time."""
        num_live = self._holdings.rows.num_taken
        return CAUTION * self.ratio.spread * math.sqrt(num_live) / self._config.block_size

    def ended(self, sequences: list[Sequence]) -> None:
        """Learn from sequences that ended by themselves."""
        for sequence in sequences:
            if sequence.status in (SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_LENGTH_CAPPED):
                self.ratio.ended(sequence.num_output_tokens, sequence.sampling.max_tokens)

    def retracted(self, sequences: list[Sequence]) -> None:
        """Somebody had to give way although these, running then, had been admitted."""
        self.ratio.retracted((s.num_output_tokens, s.sampling.max_tokens) for s in sequences)


def _different_lives(count: int) -> Float64Array:
    """Deviations from the mean, in standard deviations, of so many sequences with a constant chance to end.

    If all were expected to live for the mean, all of their blocks would be needed at the same time.
    """
    lives: Float64Array = -np.log(1 - (np.arange(count) + 0.5) / count) - 1
    return lives
