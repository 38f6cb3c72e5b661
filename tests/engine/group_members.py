"""Members of a group, as threads or as processes of their own; imports as little as it can."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.group import EngineGroup
from engine.rendezvous import GroupPlace, join_group

OPTIONS = {"--max-num-seqs": "8", "--block-size": "4"}


def place(rank: int, size: int, port: int, step_timeout_s: float = 300.0) -> GroupPlace:
    return GroupPlace(rank=rank, size=size, host="127.0.0.1", port=port, step_timeout_s=step_timeout_s)


@dataclass(frozen=True, slots=True)
class Rank:
    """A member of a group, and what its loop sleeps on."""

    group: EngineGroup
    woken: threading.Event


def join(
    where: GroupPlace,
    options: Mapping[str, str] = OPTIONS,
    report: Callable[[str, float], None] = lambda stage, fraction: None,
) -> Rank:
    woken = threading.Event()
    group = join_group(where, options, wake=woken.set, report=report)
    return Rank(group, woken)
