"""Blocks or slots that a launched copy still reads when their last owner lets go of them."""

import numpy as np

from shared_scheduler.block_manager import BlockIds, BlockManager


class LateReturns:
    """Frees pieces of one pool, those that are the source of an unfinished copy only when it is done."""

    def __init__(self, pool: BlockManager) -> None:
        self._pool = pool
        self._read_by: dict[int, int] = {}
        """Source of a copy -> newest step that copies from it."""
        self._late: list[int] = []

    def add(self, source: int, step_id: int) -> None:
        self._read_by[source] = step_id

    def free(self, ids: BlockIds) -> int:
        """Returns how many ids stay taken for now."""
        if not self._read_by:
            self._pool.free(ids)
            return 0
        late = [i for i in ids.tolist() if i in self._read_by and self._pool.count(i) == 1]
        self._pool.free(ids[~np.isin(ids, late)])
        self._late += late
        return len(late)

    def finish_step(self, step_id: int) -> None:
        if not self._read_by:
            return
        self._read_by = {source: step for source, step in self._read_by.items() if step > step_id}
        done = [source for source in self._late if source not in self._read_by]
        self._late = [source for source in self._late if source in self._read_by]
        self._pool.free(done)

    def late(self) -> BlockIds:
        """What is taken for no other reason than a copy."""
        return np.array(self._late, np.int32)
