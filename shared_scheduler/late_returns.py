"""Blocks or slots that a launched copy still reads when their last user lets go of them."""

import numpy as np

from shared_scheduler.block_manager import BlockIds, BlockManager


class LateReturns:
    """Frees pieces of one pool, those that are the source of an unfinished copy only when it is done."""

    def __init__(self, pool: BlockManager) -> None:
        self._pool = pool
        self._read_by: dict[int, int] = {}
        """Source of a copy -> newest step that copies from it."""
        self._late: list[tuple[int, BlockIds]] = []
        """A source, and what comes back when nothing copies from it any more."""

    def add(self, source: int, step_id: int) -> None:
        self._read_by[source] = step_id

    def is_read(self, ids: BlockIds) -> bool:
        """Does an unfinished copy read any of these?"""
        return bool(self._read_by) and not self._read_by.keys().isdisjoint(ids.tolist())

    def free(self, ids: BlockIds) -> int:
        """Returns how many ids stay taken for now.

        `ids` in table order: a cached source stays together with the blocks before it (`prefix_cache`).
        """
        if not self._read_by:
            self._pool.free(ids)
            return 0
        late = [at for at, i in enumerate(ids.tolist()) if i in self._read_by and self._pool.count(i) == 1]
        if late and self._pool.num_cached:
            groups = [(int(ids[late[-1]]), ids[: late[-1] + 1])]
        else:
            groups = [(int(ids[at]), ids[at : at + 1]) for at in late]
        stays = np.concatenate([group for _, group in groups]) if groups else ids[:0]
        self._pool.free(ids[~np.isin(ids, stays)])
        self._late += groups
        return int(stays.size)

    def finish_step(self, step_id: int) -> None:
        if not self._read_by:
            return
        self._read_by = {source: step for source, step in self._read_by.items() if step > step_id}
        done = [group for source, group in self._late if source not in self._read_by]
        self._late = [(source, group) for source, group in self._late if source in self._read_by]
        for group in done:
            self._pool.free(group)

    def late(self) -> BlockIds:
        """What is taken for no other reason than a copy."""
        groups = [group for _, group in self._late]
        return np.concatenate(groups) if groups else np.empty(0, np.int32)
