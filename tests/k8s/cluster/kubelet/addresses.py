"""Which pod has which address: the one that was freed last comes first, which no network forbids."""

import threading

_lock = threading.Lock()
_freed: list[int] = []
_num_used = 10


def take() -> int:
    """The number of an address."""
    global _num_used
    with _lock:
        if _freed:
            return _freed.pop()
        _num_used += 1
        return _num_used


def give_back(number: int) -> None:
    with _lock:
        _freed.append(number)
