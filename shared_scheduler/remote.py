"""COMPLETION engines: sequences whose KV is still with a prompt engine.

1. `reserve` takes blocks for all its tokens (the prompt, and what was generated elsewhere) and a slot; the
   sequence waits in `remote`. With `partial_pulls` the first `hit_tokens` of them are in cached blocks, which
   are only to be read.
2. A transfer, which is the caller's business, fills the others.
3. `admit` appends the first token, sampled by the prompt engine, and moves it to `prompted`; or `drop`
   gives everything back once no read is in flight any more.

An abort before step 3 only marks: a read may still be writing into the blocks.
"""

import numpy as np

from shared_scheduler.admission import AdmissionEstimate
from shared_scheduler.block_manager import AllocStatus
from shared_scheduler.config import EngineType, SchedulerConfig
from shared_scheduler.errors import RequestError, SchedulerError
from shared_scheduler.holdings import Holdings
from shared_scheduler.prefix_cache import NO_HIT, Hit
from shared_scheduler.queues import Queues
from shared_scheduler.results import ResultProcessor
from shared_scheduler.sequence import Sequence
from shared_scheduler.status import SequenceStatus
from wire.services import FinishReason


class RemoteArrivals:
    """The queue of sequences that wait for remote KV."""

    def __init__(
        self,
        config: SchedulerConfig,
        queues: Queues,
        holdings: Holdings,
        results: ResultProcessor,
        admission: AdmissionEstimate,
    ) -> None:
        self._config = config
        self._queues = queues
        self._holdings = holdings
        self._results = results
        self._admission = admission

    def reserve(self, sequence: Sequence, now_s: float) -> AllocStatus:
        if self._config.engine_type is not EngineType.COMPLETION:
            raise RequestError(
                f"reserve_remote on a {self._config.engine_type.value} engine: use add_sequence"
            )
        status = self._can_reserve(sequence)
        if status is AllocStatus.OK:
            self._queues.register(sequence)
            sequence.arrival_s = now_s
            needed, hit = sequence.num_blocks_needed(), self._hit(sequence)
            self._holdings.attach(sequence, needed, hit, zero_state=False)
            sequence.cache.swa_valid_start = self._valid_start(sequence, hit)
            self._queues.remote[sequence.request_id] = sequence
        return status

    def admit(self, sequence: Sequence, first_token_id: int) -> None:
        self._take(sequence)
        self._queues.prompted.append(sequence)
        sequence.cache.set_num_tokens(sequence.num_tokens)
        self._holdings.store(sequence)
        if not sequence.is_finished:
            sequence.append_token(first_token_id)
            self._results.check_stop(sequence, first_token_id, sequence.num_tokens)
        self._queues.has_marked |= sequence.is_finished

    def drop(self, sequence: Sequence, reason: FinishReason) -> None:
        self._take(sequence)
        if not sequence.is_finished:
            sequence.finish(SequenceStatus.FINISHED_ABORTED, reason)
        self._queues.report(sequence)
        self._holdings.release(sequence)

    def _take(self, sequence: Sequence) -> None:
        if self._queues.remote.pop(sequence.request_id, None) is not sequence:
            raise SchedulerError(f"{sequence.request_id!r} is not waiting for remote KV")

    def _can_reserve(self, sequence: Sequence) -> AllocStatus:
        """LATER, too, while it would take the room that one running sequence needs to grow."""
        blocks = self._holdings.blocks
        num_blocks, hit = sequence.num_blocks_needed(), self._hit(sequence)
        is_too_long = sequence.num_tokens > self._config.max_model_len
        if is_too_long or self._blocks(sequence.num_tokens + 1) > blocks.num_usable:
            return AllocStatus.NEVER
        status = self._holdings.can_hold_behind(hit, num_blocks)
        if status is not AllocStatus.OK or blocks.num_free == blocks.num_usable:
            return status
        if self._admission.is_on and not self._admission.fits(sequence, hit):
            return AllocStatus.LATER
        room = blocks.num_free - (num_blocks - hit.num_blocks + blocks.num_unused(hit.block_ids))
        return AllocStatus.OK if room >= self._largest_growth(sequence) else AllocStatus.LATER

    def _hit(self, sequence: Sequence) -> Hit:
        """Full blocks that need no transfer; a last, partly filled one always does."""
        if not self._config.partial_pulls:
            return NO_HIT
        return self._holdings.reuse.find(sequence, sequence.num_tokens)

    def _valid_start(self, sequence: Sequence, hit: Hit) -> int:
        """Blocks wholly before the window of the next token need not come."""
        window = self._config.sliding_window
        if window is None:
            return 0
        first_block = max(0, sequence.num_tokens - window + 1) // self._config.block_size
        return first_block * self._config.block_size if first_block > hit.num_blocks else 0

    def _largest_growth(self, newcomer: Sequence) -> int:
        """Blocks that the hungriest of all sequences here may take within `remote_growth_tokens`."""
        rows, ahead = self._holdings.rows, self._config.remote_growth_tokens
        taken = rows.taken()
        length = np.minimum(rows.num_tokens[taken] + ahead, rows.end_length[taken] - 1)
        growth = -(-length // self._config.block_size) - rows.num_blocks[taken]
        end = min(newcomer.num_prompt_tokens + newcomer.sampling.max_tokens, self._config.max_model_len + 1)
        own = self._blocks(min(newcomer.num_tokens + ahead, end - 1)) - newcomer.num_blocks_needed()
        return max(int(growth.max(initial=0)), own)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.block_size)
