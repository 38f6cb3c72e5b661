"""The ledgers of a sequence: what is cached, what is in flight, what is drafted, what is constrained.

While a sequence holds blocks its ever-changing numbers live in a row of `SequenceRows`; the ledgers are
the readable way to them.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np

from shared_scheduler.errors import RequestError
from shared_scheduler.rows import NO_ROW, Int32Array, SequenceRows
from shared_scheduler.status import SequenceStatus


class CacheLedger:
    """Tokens whose KV is owned, and where it is.

    Two phases: with the results of a step of q tokens, `advance_optimistically(q)` counts them all and
    `commit_processed_tokens(a)`, a <= q, takes back the rejected ones. Before that, the optimistic value is
    `num_tokens` + the schedule ledger's in-flight tokens.
    """

    __slots__ = (
        "_num_tokens", "_row", "_rows", "block_size", "hit_tokens", "last_copied_state_token", "num_resets",
        "previous_num_tokens", "swa_valid_start", "was_admitted",
    )  # fmt: skip

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.hit_tokens = 0
        """Leading tokens that were found cached when the sequence was first admitted."""
        self.was_admitted = False
        """`hit_tokens` is final: a recomputation finds what the sequence itself has left."""
        self.num_resets = 0
        """How often everything was given up, to be computed once more."""
        self.swa_valid_start = 0
        """Tokens before it, whole blocks of them, no layer will see again: their blocks hold nothing."""
        self.last_copied_state_token = 0
        self.previous_num_tokens = 0
        """`num_tokens` before `advance_optimistically`; of meaning until the commit."""
        self._num_tokens = 0
        self._rows: SequenceRows | None = None
        self._row = NO_ROW

    @property
    def num_tokens(self) -> int:
        if self._rows is None:
            return self._num_tokens
        return int(self._rows.num_tokens[self._row] - self._rows.uncached[self._row])

    @property
    def block_table(self) -> Int32Array:
        """Block ids in token order, int32; a copy, empty when nothing is held."""
        return np.empty(0, np.int32) if self._rows is None else self._rows.table(self._row).copy()

    @property
    def state_id(self) -> int | None:
        slot = 0 if self._rows is None else int(self._rows.state_slot[self._row])
        return slot or None

    def set_num_tokens(self, num_tokens: int) -> None:
        """KV of the first `num_tokens` tokens is in the blocks (it was computed, copied or moved there)."""
        if self._rows is None:
            self._num_tokens = num_tokens
        else:
            self._rows.uncached[self._row] = self._rows.num_tokens[self._row] - num_tokens

    def advance_optimistically(self, num_tokens: int) -> None:
        self.previous_num_tokens = self.num_tokens
        self.set_num_tokens(self.previous_num_tokens + num_tokens)

    def commit_processed_tokens(self, num_tokens: int) -> None:
        self.set_num_tokens(self.previous_num_tokens + num_tokens)

    def reset(self) -> None:
        self.num_resets += 1
        self.set_num_tokens(0)
        if not self.was_admitted:
            self.hit_tokens = 0
        self.swa_valid_start = 0
        self.last_copied_state_token = 0

    def bind_row(self, rows: SequenceRows, row: int) -> None:
        self._rows, self._row = rows, row
        self.set_num_tokens(self._num_tokens)

    def unbind_row(self) -> None:
        self._num_tokens = self.num_tokens
        self._rows, self._row = None, NO_ROW


class ScheduleLedger:
    """Status, cut points and in-flight tokens. At most one step is in flight behind the one being built."""

    __slots__ = (
        "_row", "_rows", "branch_id", "chunk_checkpoints", "chunked_rest_len", "schedulable", "status",
    )  # fmt: skip

    def __init__(self, schedulable: bool, branch_id: str, chunk_checkpoints: Iterable[int]) -> None:
        self.status = SequenceStatus.WAITING
        self.schedulable = schedulable
        self.branch_id = branch_id
        self.chunked_rest_len = 0
        """Prompt tokens left after the chunk in flight or last processed."""
        self.chunk_checkpoints = deque(chunk_checkpoints)
        self._rows: SequenceRows | None = None
        self._row = NO_ROW
        ascending = sorted(set(self.chunk_checkpoints))
        if list(self.chunk_checkpoints) != ascending:
            raise RequestError(f"chunk_checkpoints must ascend, got {list(self.chunk_checkpoints)}")

    @property
    def total_inflight_tokens(self) -> int:
        return 0 if self._rows is None else int(self._rows.inflight[self._row])

    @property
    def last_inflight_tokens(self) -> int:
        return 0 if self._rows is None else int(self._rows.last_inflight[self._row])

    def start_inflight_step(self, num_tokens: int) -> None:
        assert self._rows is not None
        self._rows.inflight[self._row] += num_tokens
        self._rows.last_inflight[self._row] = num_tokens

    def finish_inflight_step(self) -> None:
        assert self._rows is not None
        if self._rows.inflight[self._row] == self._rows.last_inflight[self._row]:
            self._rows.inflight[self._row] = self._rows.last_inflight[self._row] = 0
        else:
            self._rows.inflight[self._row] = self._rows.last_inflight[self._row]

    def bind_row(self, rows: SequenceRows, row: int) -> None:
        self._rows, self._row = rows, row

    def unbind_row(self) -> None:
        self._rows, self._row = None, NO_ROW


class DraftLedger:
    """Proposed continuations: ids to verify in the next step, and how past ones fared."""

    __slots__ = (
        "confidences", "info_slot", "num_accepted", "num_proposed", "token_ids",
    )  # fmt: skip

    def __init__(self) -> None:
        self.token_ids: tuple[int, ...] = ()
        self.confidences: tuple[float, ...] = ()
        """Probability that each draft is accepted, given that those before it are."""
        self.num_proposed = 0
        self.num_accepted = 0
        self.info_slot: int | None = None

    def record(self, num_accepted: int, num_proposed: int) -> None:
        """What became of the drafts of one step."""
        self.num_proposed += num_proposed
        self.num_accepted += num_accepted

    def clear(self) -> None:
        self.token_ids = ()
        self.confidences = ()


class StructuredLedger:
    """Whether a grammar constrains the sequence. Once it has started, it must never be recomputed."""

    __slots__ = ("grammar", "started")

    def __init__(self, started: bool = False, grammar: object | None = None) -> None:
        self.started = started
        self.grammar = grammar
        """As the engine compiled it; carried along, never read here."""
