import threading
from functools import partial

import pytest

from kv_transfer.pump import IDLE_S, Pump


class Turns:
    """A pump whose turns and errors are counted."""

    def __init__(self, set_up_error: Exception | None = None) -> None:
        self.log: list[str] = []
        self.errors = 0
        self.turned = threading.Event()
        self._set_up_error = set_up_error
        self.pump = Pump("test-pump", self._set_up, self._turn, lambda: self.log.append("down"), self._error)

    def _set_up(self) -> None:
        self.log.append("up")
        if self._set_up_error is not None:
            raise self._set_up_error

    def _turn(self) -> float:
        self.turned.set()
        return IDLE_S

    def _error(self) -> None:
        self.errors += 1


def test_commands_run_in_order_before_the_pump_stops() -> None:
    turns = Turns()
    turns.pump.start()
    for index in range(1000):
        turns.pump.post(partial(turns.log.append, str(index)))
    turns.pump.stop()
    assert turns.log == ["up", *map(str, range(1000)), "down"]


def test_failing_command_is_counted_and_the_next_one_runs() -> None:
    turns = Turns()
    turns.pump.start()
    turns.pump.post(lambda: [][0])
    turns.pump.post(lambda: turns.log.append("next"))
    turns.pump.stop()
    assert (turns.errors, turns.log) == (1, ["up", "next", "down"])


def test_failing_set_up_is_raised_after_tearing_down() -> None:
    turns = Turns(OSError("no"))
    with pytest.raises(OSError, match="no"):
        turns.pump.start()
    assert turns.log == ["up", "down"]
    assert not turns.turned.is_set()


def test_stop_is_idempotent_and_later_commands_are_dropped() -> None:
    turns = Turns()
    turns.pump.start()
    turns.pump.stop()
    turns.pump.stop()
    turns.pump.post(lambda: turns.log.append("late"))
    assert turns.log == ["up", "down"]
