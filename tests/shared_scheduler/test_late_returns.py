import numpy as np

from shared_scheduler import BlockManager
from shared_scheduler.late_returns import LateReturns


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_without_copies_everything_goes_back_at_once() -> None:
    blocks = BlockManager(5)
    blocks.allocate(2)
    assert LateReturns(blocks).free(ids(1, 2)) == 0
    assert blocks.num_free == 4


def test_the_source_of_a_copy_goes_back_when_the_copying_step_is_done() -> None:
    blocks = BlockManager(5)
    blocks.allocate(3)
    returns = LateReturns(blocks)
    returns.add(2, step_id=7)
    assert returns.free(ids(1, 2, 3)) == 1
    assert (blocks.num_free, returns.late().tolist()) == (3, [2])
    returns.finish_step(6)
    assert blocks.num_free == 3
    returns.finish_step(7)
    assert (blocks.num_free, returns.late().tolist()) == (4, [])


def test_a_source_with_another_owner_is_simply_let_go() -> None:
    blocks = BlockManager(5)
    blocks.allocate(1)
    blocks.pin([1])
    returns = LateReturns(blocks)
    returns.add(1, step_id=0)
    assert returns.free(ids(1)) == 0
    assert blocks.count(1) == 1
    assert returns.free(ids(1)) == 1


def test_a_source_of_two_steps_waits_for_the_newer_one() -> None:
    blocks = BlockManager(5)
    blocks.allocate(1)
    returns = LateReturns(blocks)
    returns.add(1, step_id=3)
    returns.add(1, step_id=4)
    returns.free(ids(1))
    returns.finish_step(3)
    assert blocks.num_free == 3
    returns.finish_step(4)
    assert blocks.num_free == 4
