"""What an engine does with sequences that come from, or go to, another engine: one interface, three roles."""

from collections.abc import Sequence as Items
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol

from shared_scheduler import Scheduler, Sequence
from wire.transfer import TransferPeer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

from engine.ipc import AddRequest, RequestOutput


class HandoverEvents(Protocol):
    """Where an engine's step loop meets the hand-over protocol. Called by the engine thread only."""

    def start(self, request: AddRequest, sequence: Sequence, now_s: float) -> None:
        """Take a new request in; its sequence reaches the scheduler now or once its KV is here.

        `RequestError` where its id is in use.
        """

    def abort(self, request_id: str, *, keeps_handover: bool = False) -> None:
        """Nobody wants it here. Blocks go back when no step and no transfer can touch them.

        `keeps_handover`: those of the prompt engine stay for another reader.
        """

    def withdraw(self, handover_id: str) -> None:
        """Nobody will take this hand-over; an id that is not held here is ignored."""

    def announce(self, prompts: Items[Sequence]) -> None:
        """A chunk of each is computed and in its blocks, the rest of the prompt is not."""

    def after_step(self, prompts_done: Items[Sequence], ended: Items[Sequence]) -> None:
        """A step's results are in the ledgers: announce what is ready, let go of what ended."""

    def poll(self, now_s: float) -> Items[RequestOutput]:
        """Handle what the transfer threads reported since the last call; returns failures to report."""


class HandoverState(Protocol):
    """How hand-overs stand, for reports; and their end."""

    def num_handovers(self) -> int:
        """Hand-overs held for a reader, or requests that wait for their KV."""

    def transfer_counters(self) -> dict[str, float]:
        """Counters of the protocol and its transport, by name, for the metrics."""

    def transfer_peers(self) -> tuple[TransferPeer, ...]:
        """What this engine knows of each engine at the other end of hand-overs."""

    def close(self) -> None:
        """End the transfer threads."""


class HandoverRole(HandoverEvents, HandoverState, Protocol):
    """What an engine does with sequences of other engines, as a whole."""


def flatten_counters(stats: "DataclassInstance") -> dict[str, float]:
    """The numbers of a statistics dataclass by field name; those of a dict field as `field_key`."""
    counters: dict[str, float] = {}
    for name, value in asdict(stats).items():
        if isinstance(value, dict):
            counters |= {f"{name}_{key}": float(number) for key, number in value.items()}
        else:
            counters[name] = float(value)
    return counters


class NoHandover:
    """The role of a NORMAL engine: every sequence is prefilled and decoded here."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def start(self, request: AddRequest, sequence: Sequence, now_s: float) -> None:
        self._scheduler.add_sequence(sequence, now_s)

    def abort(self, request_id: str, *, keeps_handover: bool = False) -> None:
        self._scheduler.abort(request_id)

    def withdraw(self, handover_id: str) -> None:
        pass

    def announce(self, prompts: Items[Sequence]) -> None:
        pass

    def after_step(self, prompts_done: Items[Sequence], ended: Items[Sequence]) -> None:
        pass

    def poll(self, now_s: float) -> Items[RequestOutput]:
        return ()

    def num_handovers(self) -> int:
        return 0

    def transfer_counters(self) -> dict[str, float]:
        return {}

    def transfer_peers(self) -> tuple[TransferPeer, ...]:
        return ()

    def close(self) -> None:
        pass
