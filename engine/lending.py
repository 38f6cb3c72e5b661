"""A completion engine lends what it has cached: the answers of earlier turns, which prompt engines lack.

1. asked      a prompt engine wants what is cached of some tokens, from one of them on
2. lent       the blocks are pinned and offered like a prompt that was computed; the lease is the same
3. back       the reader has let go, or its lease has expired

Where nothing is cached the reader is turned away at once.
"""

from engine.handover_role import flatten_counters
from kv_transfer.events import Asked, Released
from kv_transfer.offers import Offer
from kv_transfer.source import HandoverSource
from shared_scheduler import Loan, Scheduler

MAX_FREE_DIVISOR = 4
"""One loan takes at most this part, a quarter, of the blocks that are free."""


class Lender:
    def __init__(self, scheduler: Scheduler, source: HandoverSource) -> None:
        self._scheduler = scheduler
        self._source = source
        self._loans: dict[str, Loan] = {}
        self._num_lent_blocks = 0

    def poll(self) -> None:
        """Answer who asks, take back what was returned."""
        for event in self._source.events():
            match event:
                case Asked():
                    self._lend(event)
                case Released():
                    loan = self._loans.pop(event.handover_id, None)
                    if loan is not None:
                        self._scheduler.give_back(loan)

    def counters(self) -> dict[str, float]:
        counters = {f"lend_{name}": value for name, value in flatten_counters(self._source.stats()).items()}
        return counters | {"lend_blocks": float(self._num_lent_blocks)}

    def close(self) -> None:
        self._source.close()

    def _lend(self, asked: Asked) -> None:
        if asked.handover_id in self._loans:
            return
        block_size = self._scheduler.config.block_size
        free_before = self._scheduler.num_free_blocks
        first_block, rest = divmod(asked.first_token, block_size)
        loan = None if rest else self._scheduler.lend(asked.token_ids.tolist(), asked.cache_salt, first_block)
        if loan is None:
            self._source.withdraw(asked.handover_id)
            return
        if self._scheduler.num_free_blocks < free_before - free_before // MAX_FREE_DIVISOR:
            # Blocks that a peer reads are no room for those who decode here and would end for want of it.
            self._scheduler.give_back(loan)
            self._source.withdraw(asked.handover_id)
            return
        self._loans[asked.handover_id] = loan
        self._num_lent_blocks += loan.block_ids.size
        num_tokens = int(loan.block_ids.size) * block_size
        self._source.offer(Offer(asked.handover_id, num_tokens, loan.block_ids, None, ()))
