"""One rank of a group of two in a process of its own: `python -m tests.engine.rank_process RANK PORT MODE`.

Prints `{"event": "formed"}`, then steps for ever (busy) or sleeps as an idle engine does (idle), and prints
the error that ends the group.
"""

import json
import os
import sys

from shared_scheduler import GroupError
from tests.engine.group_members import Rank, join, place


def main(rank: int, port: int, mode: str) -> None:
    member = join(place(rank, 2, port))
    _print({"event": "formed"})
    try:
        _loop(member, mode)
    except GroupError as error:
        _print({"event": "ended", "error": str(error)})
    os._exit(0)


def _loop(member: Rank, mode: str) -> None:
    step_id = 0
    while True:
        if mode == "busy":
            step_id += 1
            member.group.begin_step(step_id, False, is_empty=False, has_work=True)
        else:
            member.woken.wait(1.0)
            member.woken.clear()
            member.group.takes_step(False)


def _print(event: dict[str, str]) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
