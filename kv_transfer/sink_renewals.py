"""When a sink renews its leases with one source, and what the answers mean."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kv_transfer.messages import MAX_RENEWALS, LeaseRef, Renewed

MIN_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class _Sent:
    sent_s: float
    leases: tuple[LeaseRef, ...]


class Renewals:
    """All leases of one peer, every sixth of the lease that the peer grants."""

    def __init__(self, lease_s: float, now_s: float) -> None:
        self.reply_timeout_s = max(lease_s, MIN_INTERVAL_S)
        self._interval_s = max(lease_s / 6, MIN_INTERVAL_S)
        self._due_s = now_s + self._interval_s
        self._sent: OrderedDict[int, _Sent] = OrderedDict()
        self._last_sequence = 0

    def is_due(self, now_s: float) -> bool:
        return now_s >= self._due_s

    def is_overdue(self, now_s: float) -> bool:
        """A question is unanswered for so long that the source's leases have run out."""
        oldest = next(iter(self._sent.values()), None)
        return oldest is not None and now_s - oldest.sent_s >= self.reply_timeout_s

    def send(self, leases: Sequence[LeaseRef], now_s: float) -> Iterator[tuple[int, list[LeaseRef]]]:
        """The messages to send, as sequence number and leases."""
        self._due_s = now_s + self._interval_s
        for start in range(0, len(leases), MAX_RENEWALS):
            part = leases[start : start + MAX_RENEWALS]
            self._last_sequence += 1
            self._sent[self._last_sequence] = _Sent(now_s, tuple(part))
            yield self._last_sequence, list(part)

    def answered(self, message: Renewed) -> list[tuple[LeaseRef, float | None]] | None:
        """Each lease of the question with the time until which it holds, None if it is gone.

        Counted from before the question was sent: never later than by the source's own clock. None if nothing
        was asked under this sequence number.
        """
        sent = self._sent.pop(message.sequence, None)
        if sent is None:
            return None
        ttls = {(lease.handover_id, lease.generation): lease.ttl_s for lease in message.leases}
        answers: list[tuple[LeaseRef, float | None]] = []
        for lease in sent.leases:
            ttl_s = ttls.get((lease.handover_id, lease.generation))
            answers.append((lease, None if ttl_s is None else sent.sent_s + ttl_s))
        return answers
