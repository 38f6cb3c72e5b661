"""What a step hands to the engine, and what its results say."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared_scheduler.batch import Batch
from shared_scheduler.budgets import AdmissionResult
from shared_scheduler.cohort import Cohort
from shared_scheduler.copies import NO_COPIES, Copies
from shared_scheduler.rows import Int32Array, RowIndices
from shared_scheduler.sequence import Sequence

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SchedulerOutputs:
    """One step. `sequences`, `rows` and `seqlens_q` are in the same order.

    `finished` (aborted or failed by mark) and `ignored` (can never fit, or preempted) ended outside a step's
    results. Each sequence is reported once in its life: there, or in `StepResults.finished`.
    """

    step_id: int
    prompt_run: bool
    cohort: Cohort
    seqlens_q: Int32Array
    batch: Batch | None
    finished: tuple[Sequence, ...] = ()
    ignored: tuple[Sequence, ...] = ()
    copies: Copies = NO_COPIES
    num_last_chunks: int = 0
    """Prompts that this step completes and that go on to decode here."""
    num_cached_tokens: int = 0
    """Prompt tokens found cached by the sequences whose first chunk this step runs."""
    admission: AdmissionResult = AdmissionResult.CONTINUE
    """Prompt step: for want of what the next waiting prompt was not taken."""

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        return self.cohort.sequences

    @property
    def rows(self) -> RowIndices:
        return self.cohort.rows

    @property
    def is_empty(self) -> bool:
        return self.batch is None

    @property
    def num_batched_tokens(self) -> int:
        return int(self.seqlens_q.sum())

    @property
    def sum_seqlen_qxk(self) -> int:
        if self.batch is None:
            return 0
        return int(np.dot(self.seqlens_q.astype(np.int64), self.batch.seqlens_k.astype(np.int64)))

    @property
    def max_seqlen_k(self) -> int:
        return 0 if self.batch is None else int(self.batch.seqlens_k.max())

    @property
    def min_seqlen_k(self) -> int:
        return 0 if self.batch is None else int(self.batch.seqlens_k.min())

    @property
    def clone_blocks(self) -> list[tuple[int, int]]:
        return self.copies.clone_blocks

    @property
    def clone_states(self) -> list[tuple[int, int]]:
        return self.copies.clone_states

    @property
    def zero_states(self) -> list[int]:
        return self.copies.zero_states


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A sequence's first output token was appended `latency_s` after its arrival."""

    sequence: Sequence
    latency_s: float


@dataclass(frozen=True, slots=True, eq=False)
class StepResults:
    """What one step changed. Row i of the arrays belongs to `outputs.sequences[i]`.

    `token_ids` int64[sum(num_appended)]: appended ids, those of sequence i at
    offsets[i]..offsets[i] + num_appended[i]. A middle chunk and a sequence that ended or was preempted
    while the step ran append nothing.
    """

    token_ids: Int64Array
    num_appended: Int32Array
    finished: tuple[Sequence, ...] = ()
    first_tokens: tuple[FirstToken, ...] = ()
    prompts_done: tuple[Sequence, ...] = ()
    """PROMPT engine: prefilled, not finished, held until `release_handover`."""

    @property
    def offsets(self) -> Int64Array:
        return np.cumsum(self.num_appended, dtype=np.int64) - self.num_appended
