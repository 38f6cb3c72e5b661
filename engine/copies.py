"""Carries out the copies that a step needs in the pools before it runs."""

from collections.abc import Iterable
from typing import Protocol

from engine.kv_pool import KVPool
from shared_scheduler import Copies

NULL = 0
"""Destination of a clone that was given up: its source went back, nothing is copied."""


class StateRows(Protocol):
    """A pool of fixed-size states, one row per slot."""

    def copy_slot(self, source: int, destination: int) -> None: ...

    def zero_slot(self, slot: int) -> None: ...


def has_copies(copies: Copies) -> bool:
    return bool(copies.clone_blocks or copies.clone_states or copies.zero_states)


def execute_copies(copies: Copies, kv_pools: Iterable[KVPool], states: StateRows | None = None) -> None:
    """Clones in their order, then zeroes: a clone may read what an earlier one wrote.

    `kv_pools`: of all ranks; a block is cloned in each.
    """
    for source, destination in copies.clone_blocks:
        if destination != NULL:
            for kv_pool in kv_pools:
                kv_pool.copy_block(source, destination)
    if not (copies.clone_states or copies.zero_states):
        return
    assert states is not None, "the scheduler hands out state slots, but this model keeps no state"
    for source, destination in copies.clone_states:
        if destination != NULL:
            states.copy_slot(source, destination)
    for slot in copies.zero_states:
        states.zero_slot(slot)
