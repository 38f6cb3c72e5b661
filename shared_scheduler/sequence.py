"""One request as the scheduler sees it: tokens, and the ledgers of `shared_scheduler.ledgers`."""

from collections.abc import Iterable
from collections.abc import Sequence as TokenSequence

import numpy as np

from shared_scheduler.errors import RequestError
from shared_scheduler.ledgers import CacheLedger, DraftLedger, ScheduleLedger, StructuredLedger
from shared_scheduler.rows import NO_ROW, Int32Array, SequenceRows
from shared_scheduler.status import FINISH_REASONS, SequenceStatus
from wire.sampling import SamplingParams
from wire.services import FinishReason

DEFAULT_BRANCH = "default"
FORK_MARK = "_"
"""First letter of the branch id of a fork that has not been admitted yet."""


class Sequence:
    """A request's committed tokens (prompt, then accepted output) and its ledgers.

    `prompt_token_ids` may be any sequence of ints; `chunk_checkpoints` are token positions, ascending, at
    which a chunk must end. A sequence that is not `schedulable` blocks the queue until it is. Sequences of
    different `cache_salt` share no blocks.
    """

    __slots__ = (
        "_num_stored", "_reason", "_row", "_rows", "_tokens", "arrival_s", "cache", "cache_salt",
        "compressed_token_ids", "draft", "history", "num_prompt_tokens", "priority", "prompt_scores",
        "request_id", "routing_key", "sampling", "schedule", "structured",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: TokenSequence[int] | Int32Array,
        sampling: SamplingParams,
        *,
        block_size: int,
        chunk_checkpoints: Iterable[int] = (),
        schedulable: bool = True,
        branch_id: str = DEFAULT_BRANCH,
        structured: StructuredLedger | None = None,
        compressed_token_ids: TokenSequence[int] | None = None,
        cache_salt: str = "",
        priority: int = 0,
        routing_key: str = "",
    ) -> None:
        if not len(prompt_token_ids):
            raise RequestError(f"request {request_id!r} has an empty prompt")
        self.request_id = request_id
        self.sampling = sampling
        self.num_prompt_tokens = len(prompt_token_ids)
        self.compressed_token_ids = compressed_token_ids
        """Parallel ids of a smaller tokenizer; carried along, never read here."""
        self.history: object | None = None
        """What the engine keeps of the tokens to draw the next; carried along, never read here."""
        self.prompt_scores: object | None = None
        """What the engine has found out about the prompt's own tokens; carried along, never read here."""
        self.arrival_s = 0.0
        self.cache = CacheLedger(block_size)
        self.cache_salt = cache_salt
        self.priority = priority
        self.routing_key = routing_key
        self.schedule = ScheduleLedger(schedulable, branch_id, chunk_checkpoints)
        self.draft = DraftLedger()
        self.structured = structured or StructuredLedger()
        self._tokens: Int32Array = np.array(prompt_token_ids, np.int32)
        self._num_stored = self.num_prompt_tokens
        self._rows: SequenceRows | None = None
        self._row = NO_ROW
        self._reason: FinishReason | None = None

    def __repr__(self) -> str:
        return f"Sequence({self.request_id!r}, {self.status.name}, {self.num_tokens} tokens)"

    # ----- tokens

    @property
    def num_tokens(self) -> int:
        return self._num_stored if self._rows is None else int(self._rows.num_tokens[self._row])

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def token_ids(self) -> list[int]:
        ids: list[int] = self.token_array().tolist()
        return ids

    @property
    def output_token_ids(self) -> list[int]:
        ids: list[int] = self.token_array()[self.num_prompt_tokens :].tolist()
        return ids

    @property
    def last_token_id(self) -> int:
        return int(self.token_array()[-1]) if self._rows is None else int(self._rows.last_token[self._row])

    def token_array(self) -> Int32Array:
        """All committed tokens, int32[num_tokens]; a view, valid until the next token."""
        if self._rows is not None:
            self._rows.flush(self._row)
        return self._tokens[: self._num_stored]

    def stored_tokens(self, start: int, end: int) -> Int32Array:
        """Tokens start..end-1; a view."""
        return (self._tokens if end <= self._num_stored else self.token_array())[start:end]

    def append_token(self, token_id: int) -> None:
        if self._rows is None:
            self.store_tokens(np.array([token_id], np.int32))
        else:
            self._rows.append_token(self._row, token_id)

    def store_tokens(self, token_ids: Int32Array) -> None:
        """Append to the sequence's own array (doubling it); rows call this when they are flushed."""
        end = self._num_stored + token_ids.size
        if end > self._tokens.size:
            tokens = np.empty(max(2 * self._tokens.size, end), np.int32)
            tokens[: self._num_stored] = self._tokens[: self._num_stored]
            self._tokens = tokens
        self._tokens[self._num_stored : end] = token_ids
        self._num_stored = end

    # ----- status

    @property
    def status(self) -> SequenceStatus:
        return self.schedule.status

    @property
    def is_finished(self) -> bool:
        return self.schedule.status >= SequenceStatus.FINISHED_STOPPED

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._reason or FINISH_REASONS.get(self.schedule.status)

    def finish(self, status: SequenceStatus, reason: FinishReason | None = None) -> None:
        """End the sequence; `reason` overrides the word that belongs to the status."""
        self.schedule.status = status
        self._reason = reason

    # ----- blocks

    @property
    def row(self) -> int:
        return self._row

    @property
    def num_stored(self) -> int:
        """Tokens in the sequence's own array; the newest may still be in its row."""
        return self._num_stored

    @property
    def holds_blocks(self) -> bool:
        return self._rows is not None

    @property
    def is_in_flight(self) -> bool:
        return self.schedule.total_inflight_tokens > 0

    @property
    def needs_whole_prompt(self) -> bool:
        """Is every prompt token to be computed, because cached ones have no logits?"""
        return self.sampling.prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def is_unadmitted_fork(self) -> bool:
        """Its blocks and slot are pins on another sequence's."""
        return self.schedule.branch_id.startswith(FORK_MARK)

    def num_blocks_needed(self) -> int:
        """ceil((committed + in flight + drafts) / block size)."""
        tokens = self.num_tokens + self.schedule.total_inflight_tokens + len(self.draft.token_ids)
        return -(-tokens // self.cache.block_size)

    def bind_row(self, rows: SequenceRows, row: int, end_length: int) -> None:
        """Move the numbers that change every step into `rows[row]`."""
        rows.num_prompt_tokens[row] = self.num_prompt_tokens
        rows.end_length[row] = end_length
        rows.has_stop_ids[row] = bool(self.sampling.stop_token_ids)
        rows.last_token[row] = self._tokens[self._num_stored - 1]
        self._rows, self._row = rows, row
        self.cache.bind_row(rows, row)
        self.schedule.bind_row(rows, row)

    def unbind_row(self) -> None:
        """Take the numbers back; the row itself belongs to the caller."""
        assert self._rows is not None
        self._rows.flush(self._row)
        self.cache.unbind_row()
        self.schedule.unbind_row()
        self._rows, self._row = None, NO_ROW

    def reset_for_recompute(self) -> None:
        """Forget everything computed, keep every token."""
        self.cache.reset()
        self.schedule.chunked_rest_len = 0
        self.schedule.branch_id = self.schedule.branch_id.removeprefix(FORK_MARK)
        self.draft.clear()
