"""The reads under way over one connection, and the hand-over that each is for."""

from collections.abc import Sequence

from kv_transfer.sink_handover import Handover
from kv_transfer.transport import BlockRead, Connection, ReadResult


class Reads:
    """A hand-over's `read_ids` are those of its reads that can still write to its destination."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._handovers: dict[int, Handover] = {}

    def __len__(self) -> int:
        return len(self._handovers)

    def start(self, handover: Handover, reads: Sequence[BlockRead]) -> None:
        """`ReadError` if it cannot start."""
        read_id = self.connection.read(reads)
        handover.read_ids.add(read_id)
        self._handovers[read_id] = handover

    def poll(self) -> list[ReadResult]:
        """The reads that are over; each is still to be taken with `finish`."""
        return self.connection.poll() if self._handovers else []

    def finish(self, result: ReadResult) -> Handover | None:
        """The hand-over whose read this was; None for one that was cancelled."""
        handover = self._handovers.pop(result.read_id, None)
        if handover is not None:
            handover.read_ids.discard(result.read_id)
        return handover

    def cancel(self, handover: Handover) -> bool:
        """True if nothing can write to the hand-over's destination any more."""
        for read_id in list(handover.read_ids):
            if self.connection.cancel(read_id):
                handover.read_ids.discard(read_id)
                del self._handovers[read_id]
        return not handover.read_ids

    def close(self) -> None:
        """Fence: when this returns, no read can write to any destination."""
        self.connection.close()
        for handover in self._handovers.values():
            handover.read_ids.clear()
        self._handovers.clear()

    def check_invariants(self) -> None:
        for read_id, handover in self._handovers.items():
            assert read_id in handover.read_ids, handover
