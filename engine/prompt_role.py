"""The PROMPT engine's side of a hand-over.

1. start       the sequence is prefilled like any other, perhaps after a part of it was fetched from the
               engine that decoded an earlier turn (`pull_back`); its hand-over id is remembered
2. announce    a chunk is computed: a reader may read its whole blocks while the next one is
3. after_step  prefill done and some choice goes on: the blocks are offered and stay pinned
               finished (every choice by EOS or by length, or aborted): the hand-over is withdrawn, a waiting
               reader is told. One that was announced but never offered pins nothing: its blocks are the
               scheduler's again, and what was read of them is never confirmed
4. poll        the reader let go, its lease expired, or nobody wants it any more: the blocks go back
"""

from collections.abc import Sequence as Items

from engine.choices import Choices
from engine.handover_role import flatten_counters
from engine.ipc import AddRequest, RequestOutput
from engine.pull_back import PullBack
from kv_transfer.events import Asked, Released
from kv_transfer.offers import Announcement, Offer
from kv_transfer.source import HandoverSource
from shared_scheduler import RequestError, Scheduler, Sequence
from wire.transfer import TransferPeer


class PromptHandover:
    def __init__(
        self,
        scheduler: Scheduler,
        source: HandoverSource,
        choices: Choices,
        *,
        announces_chunks: bool = True,
        pull_back: PullBack | None = None,
    ) -> None:
        """`announces_chunks`: readers may begin before the whole prompt is computed."""
        self._pull_back = pull_back
        self._announces_chunks = announces_chunks
        self._scheduler = scheduler
        self._source = source
        self._choices = choices
        self._request_ids: dict[str, str] = {}
        """hand-over id → request id, of all that are prefilling or held."""
        self._handover_ids: dict[str, str] = {}
        """request id → hand-over id, of the same."""
        self._fetching: dict[str, Sequence] = {}
        """hand-over id → sequence that is not scheduled yet."""
        self._held: dict[str, Sequence] = {}
        """hand-over id → sequence whose blocks a reader may be reading."""

    def start(self, request: AddRequest, sequence: Sequence, now_s: float) -> None:
        handover_id = request.handover_id
        assert handover_id is not None, "the prompt service always names a hand-over"
        if handover_id in self._request_ids:
            raise RequestError(f"handover_id {handover_id!r} is in use")
        if request.request_id in self._handover_ids:
            raise RequestError(f"request_id {request.request_id!r} is in use")
        if self._is_fetched(request, sequence, now_s):
            self._fetching[handover_id] = sequence
        else:
            self._scheduler.add_sequence(sequence, now_s)
        self._request_ids[handover_id] = request.request_id
        self._handover_ids[request.request_id] = handover_id

    def abort(self, request_id: str, *, keeps_handover: bool = False) -> None:
        handover_id = self._handover_ids.get(request_id)
        if handover_id is not None:
            self.withdraw(handover_id)

    def withdraw(self, handover_id: str) -> None:
        if handover_id in self._held:
            self._source.withdraw(handover_id)
        elif handover_id in self._request_ids:
            self._stop_fetching(handover_id)
            self._scheduler.abort(self._request_ids[handover_id])

    def announce(self, prompts: Items[Sequence]) -> None:
        if not self._announces_chunks:
            return
        for sequence in prompts:
            handover_id = self._handover_ids[sequence.request_id]
            cache = sequence.cache
            num_blocks = cache.num_tokens // cache.block_size
            if num_blocks:
                self._source.announce(
                    Announcement(
                        handover_id, sequence.num_tokens, cache.block_table[:num_blocks], cache.num_resets
                    )
                )

    def after_step(self, prompts_done: Items[Sequence], ended: Items[Sequence]) -> None:
        for sequence in prompts_done:
            self._offer(sequence)
        for sequence in ended:
            handover_id = self._handover_ids.get(sequence.request_id)
            if handover_id is not None:
                self._forget(handover_id)
                self._source.withdraw(handover_id)

    def poll(self, now_s: float) -> Items[RequestOutput]:
        for event in self._source.events():
            match event:
                case Released():
                    self._release(event.handover_id)
                case Asked():
                    self._source.withdraw(event.handover_id)  # only completion engines lend
        if self._pull_back is not None:
            for sequence in self._pull_back.poll(now_s):
                del self._fetching[self._handover_ids[sequence.request_id]]
                self._scheduler.add_sequence(sequence, now_s)
        return ()

    def num_handovers(self) -> int:
        return len(self._held)

    def transfer_counters(self) -> dict[str, float]:
        counters = flatten_counters(self._source.stats())
        return counters if self._pull_back is None else counters | self._pull_back.counters()

    def transfer_peers(self) -> tuple[TransferPeer, ...]:
        return self._source.peers()

    def close(self) -> None:
        self._source.close()
        if self._pull_back is not None:
            self._pull_back.close()

    def _is_fetched(self, request: AddRequest, sequence: Sequence, now_s: float) -> bool:
        """Has fetching a part of it begun?"""
        if self._pull_back is None or request.previous_engine is None or sequence.needs_whole_prompt:
            return False
        return self._pull_back.begin(sequence, request.previous_engine, now_s)

    def _stop_fetching(self, handover_id: str) -> None:
        """Its end is the scheduler's to report."""
        sequence = self._fetching.pop(handover_id, None)
        if sequence is not None and self._pull_back is not None:
            self._pull_back.cancel(sequence)
            self._scheduler.add_sequence(sequence, sequence.arrival_s)

    def _release(self, handover_id: str) -> None:
        sequence = self._held.pop(handover_id, None)
        if sequence is not None:
            self._forget(handover_id)
            self._scheduler.release_handover(sequence)

    def _offer(self, sequence: Sequence) -> None:
        handover_id = self._handover_ids[sequence.request_id]
        self._held[handover_id] = sequence
        self._source.offer(
            Offer(
                handover_id=handover_id,
                num_tokens=sequence.cache.num_tokens,
                block_ids=sequence.cache.block_table,
                state_slot=sequence.cache.state_id,
                first_tokens=self._choices.starts(sequence),
                attempt=sequence.cache.num_resets,
            )
        )

    def _forget(self, handover_id: str) -> None:
        del self._handover_ids[self._request_ids.pop(handover_id)]
