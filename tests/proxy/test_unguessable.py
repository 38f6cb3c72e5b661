"""Ids and seeds come from the kernel and never twice, in a forked process neither."""

import multiprocessing

from proxy.unguessable import NUM_DRAWN, new_id, new_seed
from wire.sampling import MAX_SEED


def test_ids_and_seeds_have_their_form_and_differ_beyond_what_is_drawn_at_once() -> None:
    ids = {new_id() for _ in range(3 * NUM_DRAWN)}
    assert len(ids) == 3 * NUM_DRAWN
    assert all(len(one) == 32 and int(one, 16) >= 0 for one in ids)
    seeds = {new_seed() for _ in range(3 * NUM_DRAWN)}
    assert len(seeds) == 3 * NUM_DRAWN
    assert all(0 <= seed <= MAX_SEED for seed in seeds)


def _draw(answer: "multiprocessing.Queue[tuple[str, int]]") -> None:
    answer.put((new_id(), new_seed()))


def test_a_forked_process_draws_for_itself() -> None:
    new_id(), new_seed()  # so that some are left to be drawn
    context = multiprocessing.get_context("fork")
    answer: multiprocessing.Queue[tuple[str, int]] = context.Queue()
    child = context.Process(target=_draw, args=(answer,))
    child.start()
    drawn_id, drawn_seed = answer.get(timeout=30)
    child.join()
    assert drawn_id not in {new_id() for _ in range(NUM_DRAWN)}
    assert drawn_seed not in {new_seed() for _ in range(NUM_DRAWN)}
