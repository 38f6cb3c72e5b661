"""The budgets of one prompt step: room in the pool, tokens of the step, tokens of one chunk."""

from dataclasses import dataclass
from enum import Enum

from shared_scheduler.block_manager import AllocStatus


class AdmissionResult(Enum):
    """May the next waiting prompt be taken, and if not, for want of what?"""

    CONTINUE = "continue"
    NO_TOKEN = "no_token"
    """The pool has no room for it now, its expected output included."""
    OTHER = "other"
    """The step is full."""


@dataclass(slots=True)
class StepBudgets:
    """What is left of one prompt step."""

    num_sequences: int
    num_tokens: int
    num_scored: int
    """Tokens of prompts whose log probabilities are asked for."""
    max_chunk: int
    sum_seqlen_k: int
    alignment: int
    is_untouched: bool = True

    def check(self, pool: AllocStatus, seqlen_k: int) -> AdmissionResult:
        """For a prompt that the pool can hold as `pool` says, `seqlen_k` tokens long."""
        if pool is not AllocStatus.OK:
            return AdmissionResult.NO_TOKEN
        if self.num_sequences < 1 or self.sum_seqlen_k < seqlen_k:
            return AdmissionResult.OTHER
        return AdmissionResult.CONTINUE

    def chunk_room(self, *, is_scored: bool) -> int:
        """Tokens that one prompt may take of what is left."""
        room = min(self.num_tokens, self.max_chunk)
        return min(room, self.num_scored) if is_scored else room

    def take(self, length: int, seqlen_k: int, *, is_scored: bool) -> None:
        """A chunk counts as its aligned length, against the sum of k as the whole sequence."""
        self.num_sequences -= 1
        self.num_tokens -= -(-length // self.alignment) * self.alignment
        self.num_scored -= length if is_scored else 0
        self.sum_seqlen_k -= seqlen_k
        self.is_untouched = False
