"""What can go wrong between a client and the API server, at a test's word.

api.faults.fail("list", "pods", 504, times=2)    the next two lists get 504; also 403, 410, 429, 500
api.faults.fail("watch", "pods", 410)            a watch is refused at its start
api.faults.forget_history()                      watches from before get the ERROR event 410
api.faults.cut_watches("pods")                   streams end in the middle, without their last chunk
api.faults.cut_watches("pods", how="in_event")   the same, in the middle of an event's line
api.faults.cut_watches("pods", how="cleanly")    as when the server's own time-out ends them
api.faults.lose("pods", "DELETED", times=1)      no watch is ever told of it; lists tell the truth
api.faults.silence("pods", True)                 watches stay open and say nothing, until False
api.stop(); api.start()                          no server at its port; then the same one again
"""

import threading
from dataclasses import dataclass
from typing import Literal

from tests.k8s.api_stub.store import ApiError, EventType, Store

Verb = Literal["get", "list", "watch", "create", "update", "patch", "delete"]
CutKind = Literal["abruptly", "in_event", "cleanly"]
REASONS = {
    403: "Forbidden",
    404: "NotFound",
    410: "Expired",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


@dataclass(slots=True)
class _Planned:
    verb: Verb
    plural: str
    code: int
    times_left: int


class Faults:
    """Planned faults, and the state that running watches look at."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._failures: list[_Planned] = []
        self._losses: dict[tuple[str, EventType], int] = {}
        self._silent: set[str] = set()
        self._cuts: dict[str, tuple[int, CutKind]] = {}
        store.lose_event = self._is_lost

    def fail(self, verb: Verb, plural: str, code: int, times: int = 1) -> None:
        assert code in REASONS
        with self._lock:
            self._failures.append(_Planned(verb, plural, code, times))

    def clear(self) -> None:
        """Nothing that was planned happens any more."""
        with self._lock:
            self._failures.clear()
            self._losses.clear()

    def forget_history(self) -> None:
        self._store.forget_history()

    def cut_watches(self, plural: str, how: CutKind = "abruptly") -> None:
        with self._store.changed:
            number, _ = self._cuts.get(plural, (0, how))
            self._cuts[plural] = (number + 1, how)
            self._store.changed.notify_all()

    def lose(self, plural: str, type: EventType, times: int = 1) -> None:
        with self._lock:
            self._losses[plural, type] = self._losses.get((plural, type), 0) + times

    def silence(self, plural: str, is_silent: bool) -> None:
        with self._store.changed:
            (self._silent.add if is_silent else self._silent.discard)(plural)
            self._store.changed.notify_all()

    def check(self, verb: str, plural: str) -> None:
        """Raises the error planned for this call, if there is one."""
        with self._lock:
            for planned in self._failures:
                if (planned.verb, planned.plural) == (verb, plural):
                    planned.times_left -= 1
                    if not planned.times_left:
                        self._failures.remove(planned)
                    message = f"injected: {verb} {plural}"
                    raise ApiError(planned.code, REASONS[planned.code], message)

    def cut(self, plural: str) -> tuple[int, CutKind]:
        """How often streams of it were cut, and how the last time."""
        return self._cuts.get(plural, (0, "abruptly"))

    def is_silent(self, plural: str) -> bool:
        return plural in self._silent

    def _is_lost(self, plural: str, type: EventType) -> bool:
        with self._lock:
            left = self._losses.get((plural, type), 0)
            self._losses[plural, type] = max(0, left - 1)
            return left > 0
