"""Hand-overs that were given up before the hello was over."""

from collections import OrderedDict

from kv_transfer.messages import Outcome

MAX_FAREWELLS = 4096


class Farewells:
    """What the source is to be told once it can be, so that it need not wait for the lease."""

    def __init__(self) -> None:
        self._outcomes: OrderedDict[str, Outcome] = OrderedDict()

    def add(self, handover_id: str, outcome: Outcome) -> None:
        self._outcomes[handover_id] = outcome
        if len(self._outcomes) > MAX_FAREWELLS:
            self._outcomes.popitem(last=False)

    def forget(self, handover_id: str) -> None:
        """It is wanted again: no late farewell may end it."""
        self._outcomes.pop(handover_id, None)

    def take(self) -> list[tuple[str, Outcome]]:
        taken = list(self._outcomes.items())
        self._outcomes.clear()
        return taken
