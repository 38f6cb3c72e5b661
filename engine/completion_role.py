"""The COMPLETION engine's side of a hand-over.

1. asked      the prompt engine was asked for the hand-over; its first chunk is not computed
2. offered    there is something to read; blocks for the whole prompt and a slot are reserved here, at once or
              when there is room, which what is on its way here may take only a share of
3. pulling    blocks are read into place as they are computed, but for those found in this engine's own cache
4. arrived    all reads are in and confirmed: every choice is ready to decode and leaves this module
5. leaving    it failed, was aborted, or waited too long; its blocks go back once no read can touch them

One that finds no room in time is declined: its prompt engine keeps it for another completion engine.
"""

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal

from engine.choices import Choices
from engine.handover_role import flatten_counters
from engine.ipc import AddRequest, RequestFailure, RequestOutput
from engine.lending import Lender
from kv_transfer.events import Arrived, Failed, FailReason, Offered, Reclaimable
from kv_transfer.messages import ChoiceStart
from kv_transfer.sink import HandoverSink
from shared_scheduler import AllocStatus, RequestError, Scheduler, Sequence
from wire.services import ServiceError
from wire.transfer import TransferPeer

Stage = Literal["asked", "offered", "pulling", "leaving"]

_STATUS_OF_FAILURE: dict[FailReason, int] = {
    "incompatible": 409,
    "wrong_engine": 409,
    "expired": 410,
    "offer_timeout": 504,
    "read_timeout": 504,
    "confirm_timeout": 504,
}
"""HTTP status of a failed hand-over; every other reason is a 503: this pair cannot serve the request now."""


@dataclass(slots=True)
class Arrival:
    """A sequence on its way here."""

    sequence: Sequence
    handover_id: str
    deadline_s: float
    stage: Stage = "asked"
    room_deadline_s: float = math.inf


@dataclass(frozen=True, slots=True)
class ArrivalLimits:
    """What sequences on their way here may take, of time and of the pool."""

    wait_s: float
    """From the request to the last byte."""
    room_wait_s: float
    """For room, of a hand-over that could be read."""
    share: float
    """Of the pool's blocks; one sequence may always come."""


class CompletionHandover:
    def __init__(
        self,
        scheduler: Scheduler,
        sink: HandoverSink,
        choices: Choices,
        limits: ArrivalLimits,
        lender: Lender | None = None,
        *,
        vocab_size: int,
    ) -> None:
        """`vocab_size`: of the model; no peer may name a token beyond it."""
        self._vocab_size = vocab_size
        self._lender = lender
        self._scheduler = scheduler
        self._sink = sink
        self._choices = choices
        self._limits = limits
        self._max_arriving_blocks = int(limits.share * scheduler.num_usable_blocks)
        self._arrivals: dict[str, Arrival] = {}
        """By hand-over id, in order of arrival."""
        self._handover_ids: dict[str, str] = {}
        """request id → hand-over id, of those in `_arrivals` that have not failed."""

    def start(self, request: AddRequest, sequence: Sequence, now_s: float) -> None:
        handover_id, prompt_engine = request.handover_id, request.prompt_engine
        assert handover_id is not None, "the completion service refuses requests without a hand-over"
        assert prompt_engine is not None
        if handover_id in self._arrivals:
            raise RequestError(f"handover_id {handover_id!r} is in use")
        if request.request_id in self._handover_ids or self._scheduler.get(request.request_id) is not None:
            raise RequestError(f"request_id {request.request_id!r} is in use")
        self._arrivals[handover_id] = Arrival(sequence, handover_id, now_s + self._limits.wait_s)
        self._handover_ids[request.request_id] = handover_id
        self._sink.request(handover_id, prompt_engine, self._limits.wait_s)

    def abort(self, request_id: str, *, keeps_handover: bool = False) -> None:
        handover_id = self._handover_ids.pop(request_id, None)
        if handover_id is None:
            self._scheduler.abort(request_id)
        else:
            self._leave(self._arrivals[handover_id], keeps_handover=keeps_handover)

    def withdraw(self, handover_id: str) -> None:
        pass  # a prompt engine's business; here a hand-over ends by the abort of its request

    def announce(self, prompts: Items[Sequence]) -> None:
        pass  # nothing is prefilled here

    def after_step(self, prompts_done: Items[Sequence], ended: Items[Sequence]) -> None:
        pass

    def poll(self, now_s: float) -> Items[RequestOutput]:
        failures: list[RequestOutput] = []
        if self._lender is not None:
            self._lender.poll()
        for event in self._sink.events():
            arrival = self._arrivals.get(event.handover_id)
            if arrival is None:
                continue
            match event:
                case Offered():
                    failures += self._on_offered(arrival, event, now_s)
                case Arrived():
                    failures += self._on_arrived(arrival, event, now_s)
                case Failed():
                    failures += self._on_failed(arrival, event)
                case Reclaimable():
                    self._forget(arrival)
        failures += self._make_room(now_s)
        failures += self._expire(now_s)
        return failures

    def num_handovers(self) -> int:
        return len(self._arrivals)

    def transfer_counters(self) -> dict[str, float]:
        counters = flatten_counters(self._sink.stats())
        return counters if self._lender is None else counters | self._lender.counters()

    def transfer_peers(self) -> tuple[TransferPeer, ...]:
        return self._sink.peers()

    def close(self) -> None:
        """What has not arrived is left to other completion engines."""
        for arrival in self._arrivals.values():
            if arrival.stage != "leaving":
                self._leave(arrival, keeps_handover=True)
        self._sink.close()
        if self._lender is not None:
            self._lender.close()

    def _on_offered(self, arrival: Arrival, offer: Offered, now_s: float) -> list[RequestOutput]:
        if arrival.stage != "asked":
            return []
        num_tokens = arrival.sequence.num_tokens
        if offer.num_tokens != num_tokens:
            message = (
                f"the prompt engine holds {offer.num_tokens} tokens under this hand-over id, "
                f"the request has {num_tokens}"
            )
            return [self._give_up(arrival, 409, "handover_mismatch", message)]
        arrival.stage = "offered"
        arrival.room_deadline_s = now_s + self._limits.room_wait_s
        return []

    def _make_room(self, now_s: float) -> list[RequestOutput]:
        """Reserve blocks for offered sequences, in order of arrival, until one has to wait.

        What runs keeps the rest of the pool; a sequence that comes alone may be larger than the share.
        """
        failures: list[RequestOutput] = []
        offered = [arrival for arrival in self._arrivals.values() if arrival.stage == "offered"]
        num_taken = self.num_arriving_blocks if offered else 0
        for arrival in offered:
            num_needed = arrival.sequence.num_blocks_needed()
            if num_taken and num_taken + num_needed > self._max_arriving_blocks:
                break
            status = self._scheduler.reserve_remote(arrival.sequence, now_s)
            if status is AllocStatus.LATER:
                break
            if status is AllocStatus.NEVER:
                message = (
                    f"{arrival.sequence.num_tokens} prompt tokens never fit this engine's KV pool "
                    "(--kv-bytes)"
                )
                failures.append(self._give_up(arrival, 400, "context_length_exceeded", message))
                continue
            num_taken += num_needed
            self._pull(arrival)
        return failures

    @property
    def num_arriving_blocks(self) -> int:
        """Of sequences on their way here, also of those that a read may still write to."""
        return sum(
            arrival.sequence.cache.block_table.size
            for arrival in self._arrivals.values()
            if arrival.sequence.holds_blocks
        )

    def _pull(self, arrival: Arrival) -> None:
        """All but the blocks that were found in this engine's own cache, or that no layer will see again."""
        arrival.stage = "pulling"
        cache = arrival.sequence.cache
        first_block = max(cache.hit_tokens, cache.swa_valid_start) // cache.block_size
        self._sink.pull(
            arrival.handover_id, cache.block_table[first_block:], cache.state_id, first_block=first_block
        )

    def _on_arrived(self, arrival: Arrival, event: Arrived, now_s: float) -> list[RequestOutput]:
        if arrival.stage != "pulling":
            # Aborted while the confirmation was on its way: nothing reads any more, nobody wants it.
            self._forget(arrival)
            return []
        request_id = arrival.sequence.request_id
        mismatch = self._mismatch(arrival.sequence, event.first_tokens)
        if mismatch is not None:
            self._forget(arrival)
            return [_failure(request_id, 409, "handover_mismatch", mismatch)]
        self._choices.admit(arrival.sequence, event.first_tokens, now_s)
        del self._handover_ids[request_id], self._arrivals[arrival.handover_id]
        return []

    def _mismatch(self, sequence: Sequence, starts: Items[ChoiceStart]) -> str | None:
        """Why the request cannot go on from these first tokens."""
        if not starts:
            return "the prompt engine offers no choice that goes on"
        for start in starts:
            if start.token_id >= self._vocab_size:
                return f"the prompt engine offers token {start.token_id} of {self._vocab_size} in all"
        return self._choices.mismatch(sequence, starts)

    def _on_failed(self, arrival: Arrival, event: Failed) -> list[RequestOutput]:
        was_wanted = arrival.stage != "leaving"
        arrival.stage = "leaving"
        if event.blocks_safe:
            self._forget(arrival)
        if not was_wanted:
            return []
        request_id = arrival.sequence.request_id
        self._handover_ids.pop(request_id, None)
        if event.reason == "withdrawn":
            return [RequestOutput(request_id=request_id, finish_reason="handover_withdrawn", is_last=True)]
        status = _STATUS_OF_FAILURE.get(event.reason, 503)
        return [_failure(request_id, status, f"handover_{event.reason}", event.message)]

    def _expire(self, now_s: float) -> list[RequestOutput]:
        failures: list[RequestOutput] = []
        for arrival in [a for a in self._arrivals.values() if a.stage != "leaving"]:
            if arrival.stage == "offered" and min(arrival.room_deadline_s, arrival.deadline_s) <= now_s:
                failures.append(self._decline(arrival))
            elif arrival.deadline_s <= now_s:
                message = (
                    f"the request waited {self._limits.wait_s:g} s in stage {arrival.stage!r} "
                    "(--handover-wait-s)"
                )
                failures.append(self._give_up(arrival, 504, "handover_timeout", message))
        return failures

    def _decline(self, arrival: Arrival) -> RequestOutput:
        """No room: another completion engine may take this hand-over while its lease lives."""
        request_id = arrival.sequence.request_id
        self._handover_ids.pop(request_id, None)
        self._leave(arrival, keeps_handover=True)
        return _failure(
            request_id,
            503,
            "handover_no_room",
            "no room for its KV came free in time (--room-wait-s, --arrival-share)",
        )

    def _give_up(self, arrival: Arrival, status: int, code: str, message: str) -> RequestOutput:
        request_id = arrival.sequence.request_id
        self._handover_ids.pop(request_id, None)
        self._leave(arrival)
        return _failure(request_id, status, code, message)

    def _leave(self, arrival: Arrival, *, keeps_handover: bool = False) -> None:
        """Let go of a hand-over at any stage; `Reclaimable` will say when its blocks are free of reads.

        `keeps_handover`: the prompt engine keeps it for another reader, for one lease.
        """
        arrival.stage = "leaving"
        if keeps_handover:
            self._sink.decline(arrival.handover_id)
        else:
            self._sink.abandon(arrival.handover_id)

    def _forget(self, arrival: Arrival) -> None:
        if arrival.sequence.holds_blocks:
            self._scheduler.drop_remote(arrival.sequence)
        del self._arrivals[arrival.handover_id]
        request_id = arrival.sequence.request_id
        if self._handover_ids.get(request_id) == arrival.handover_id:  # its id may be in use again
            del self._handover_ids[request_id]


def _failure(request_id: str, status: int, code: str, message: str) -> RequestOutput:
    error_type = "invalid_request_error" if status < 500 else "server_error"
    error = ServiceError(message=message, type=error_type, code=code)
    return RequestOutput(request_id=request_id, failure=RequestFailure(status, error), is_last=True)
