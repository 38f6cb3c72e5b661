"""Copies between pool rows happen before the step that relies on them: forks diverge without harm."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.choices import NO_DRAWS
from engine.copies import execute_copies
from engine.kv_pool import KVLayout, KVPool
from engine.sampler import Sampler
from engine.step_executor import ModelStep
from shared_scheduler import Copies
from tests.engine.pair import greedy, tiny_checkpoint
from tests.engine.tiny_engine import Request, TinyModel, answers_alone, normal_engine
from wire.sampling import SamplingParams

PROMPT = (9, 8, 7, 6, 5)
"""One block and a quarter."""
CHILD_SAMPLING = SamplingParams(max_tokens=10, temperature=1.0, seed=5, ignore_eos=True)


class ListedSlots:
    """Notes what is asked of a state pool."""

    def __init__(self) -> None:
        self.done: list[tuple[int, ...]] = []

    def copy_slot(self, source: int, destination: int) -> None:
        self.done.append((source, destination))

    def zero_slot(self, slot: int) -> None:
        self.done.append((slot,))


@pytest.fixture
def pool() -> KVPool:
    pool = KVPool(KVLayout(num_layers=2, block_size=4, num_kv_heads=1, head_dim=8), 5)
    for block_id in range(5):
        pool.tensor[block_id] = block_id
    return pool


def block_values(pool: KVPool) -> list[float]:
    assert torch.equal(pool.tensor.amin((1, 2, 3, 4, 5)), pool.tensor.amax((1, 2, 3, 4, 5)))
    return pool.tensor[:, 0, 0, 0, 0, 0].tolist()


def test_blocks_are_cloned_in_order_and_a_given_up_clone_copies_nothing(pool: KVPool) -> None:
    execute_copies(Copies(clone_blocks=[(3, 1), (1, 2), (4, 0)]), [pool])
    assert block_values(pool) == [0, 3, 3, 3, 4]


def test_slots_are_cloned_before_others_are_zeroed(pool: KVPool) -> None:
    slots = ListedSlots()
    execute_copies(Copies(clone_states=[(1, 2), (3, 0)], zero_states=[1, 4]), [pool], slots)
    assert slots.done == [(1, 2), (1,), (4,)]


def test_state_copies_without_a_state_pool_are_a_mistake(pool: KVPool) -> None:
    with pytest.raises(AssertionError, match="no state"):
        execute_copies(Copies(zero_states=[1]), [pool])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel.load(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_turns", range(2, 8))
def test_parent_and_forks_answer_as_if_each_were_alone(
    model: TinyModel, num_turns: int, overlap: bool
) -> None:
    """One fork goes on as its parent does, one starts its own answer from the parent's prompt."""
    parent, other = Request("parent", PROMPT, greedy(12)), Request("other", PROMPT, CHILD_SAMPLING)
    normal = normal_engine(model.runner(32), overlap=overlap)
    normal.engine.add(parent.message())
    for _ in range(num_turns):
        normal.turn()
    sequence = normal.scheduler.get("parent")
    assert sequence is not None
    num_shared = sequence.num_output_tokens
    normal.scheduler.fork(sequence, "twin", now_s=0.0)
    normal.scheduler.fork(sequence, "other", other.sampling, output_token_ids=(), now_s=0.0)
    while normal.engine.has_work:
        normal.turn()
    alone = answers_alone(model, [parent, other])
    assert normal.answers["parent"].token_ids == alone["parent"]
    assert normal.answers["other"].token_ids == alone["other"]
    assert normal.answers["twin"].token_ids == alone["parent"][num_shared:]
    assert normal.answers["twin"].indices == list(range(num_shared, 12))
    assert normal.is_drained
    normal.engine.close()


class WatchedPool(KVPool):
    """Notes what its blocks hold whenever somebody waits for its device."""

    seen: tuple[list[float], ...] = ()

    def wait(self) -> None:
        self.seen = (*self.seen, block_values(self))


@pytest.mark.parametrize(
    ("copies", "seen"),
    [(Copies(clone_blocks=((2, 3),)), [[0.0, 1.0, 2.0, 2.0, 4.0]]), (Copies(), [])],
)
def test_a_step_of_copies_alone_ends_when_its_device_has_made_them(
    copies: Copies, seen: list[list[float]]
) -> None:
    """Nothing is drawn that would wait for them, and the blocks may be handed over next."""
    pool = WatchedPool(KVLayout(num_layers=2, block_size=4, num_kv_heads=1, head_dim=8), 5)
    for block_id in range(5):
        pool.tensor[block_id] = block_id
    runner: Any = SimpleNamespace(kv_shards=(pool,), states=None)
    outputs: Any = SimpleNamespace(copies=copies, batch=None)
    outcome = ModelStep(runner, Sampler()).run(outputs, NO_DRAWS, (), (), None)
    assert outcome.token_ids.size == 0
    assert list(pool.seen) == seen
