"""When a peer that keeps failing is left alone for a while.

1. *Closed*: fewer than `breaker_failures` failures in a row. Every request tries.
2. *Open*: requests fail at once until a pause is over. The pause doubles with each failure, up to a bound,
   and is jittered so that many readers do not come back together.
3. *Half-open*: the pause is over. One session is tried; other requests fail at once until its hello is over.

A read that arrives closes it. A restarted engine has a new epoch, so it is another peer and starts closed.
"""

import random
from collections import OrderedDict
from dataclasses import dataclass

from kv_transfer.settings import TransferSettings
from wire.services import PromptEngineAddress


@dataclass(slots=True)
class _Record:
    num_failures: int = 0
    until_s: float = 0.0
    is_probing: bool = False
    message: str = ""


class Breakers:
    """One record for each peer that has failed since its last read, at most `max_peers` of them."""

    def __init__(self, settings: TransferSettings, source: random.Random | None = None) -> None:
        self._settings = settings
        self._random = source or random.Random()
        self._records: OrderedDict[PromptEngineAddress, _Record] = OrderedDict()

    def refusal(self, address: PromptEngineAddress, now_s: float) -> str | None:
        """Why a request to this peer must fail now; None if it may try."""
        record = self._records.get(address)
        if record is None or record.num_failures < self._settings.breaker_failures:
            return None
        if record.is_probing:
            again = "it is being tried again now"
        elif now_s < record.until_s:
            again = f"it is tried again in {record.until_s - now_s:.1f} s"
        else:
            return None
        return f"it failed {record.num_failures} times in a row ({record.message}); {again}"

    def paused_engines(self) -> list[str]:
        """Open or half-open ones, by engine id."""
        return [
            address.engine_id
            for address, record in list(self._records.items())
            if record.num_failures >= self._settings.breaker_failures
        ]

    def trying(self, address: PromptEngineAddress) -> None:
        """A session with it begins."""
        if address in self._records:
            self._records[address].is_probing = True

    def failed(self, address: PromptEngineAddress, message: str, now_s: float) -> None:
        """Its session ended by its fault, or by the link's."""
        record = self._records.setdefault(address, _Record())
        self._records.move_to_end(address)
        if len(self._records) > self._settings.max_peers:
            self._records.popitem(last=False)
        record.num_failures += 1
        record.is_probing = False
        record.message = message
        record.until_s = now_s + self._pause_s(record.num_failures)

    def ended(self, address: PromptEngineAddress) -> None:
        """A session with it ended by nobody's fault: the next one may try."""
        if address in self._records:
            self._records[address].is_probing = False

    def worked(self, address: PromptEngineAddress) -> None:
        """A read from it arrived."""
        self._records.pop(address, None)

    def _pause_s(self, num_failures: int) -> float:
        doublings = min(max(0, num_failures - self._settings.breaker_failures), 30)
        longest_s = min(self._settings.breaker_max_pause_s, self._settings.breaker_pause_s * 2.0**doublings)
        return longest_s * self._random.uniform(0.5, 1.0)
