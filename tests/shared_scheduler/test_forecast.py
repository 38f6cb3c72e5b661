"""How full the pool becomes: peaks lie just before each expected end."""

from random import Random

import numpy as np

from shared_scheduler.forecast import PoolForecast


def forecast(*sequences: tuple[int, int], block_size: int = 1) -> PoolForecast:
    """Of (tokens, steps to go), with blocks for exactly the tokens."""
    tokens = np.array([tokens for tokens, _ in sequences], np.int64)
    blocks = -(-tokens // block_size)
    steps = np.array([steps for _, steps in sequences], np.int64)
    return PoolForecast(tokens, blocks, steps, block_size=block_size, num_used=int(blocks.sum()))


def test_a_sequence_alone_peaks_at_its_end() -> None:
    assert forecast((10, 5)).peak() == 15


def test_who_ends_early_makes_room_for_who_stays() -> None:
    """At step 2: 10 + 2 and 4 + 2; at step 6, the first one gone: 4 + 6."""
    assert forecast((10, 2), (4, 6)).peak() == 18


def test_the_peak_is_not_the_sum_of_all_ends() -> None:
    assert forecast((100, 1), (1, 60), (1, 60)).peak() == 122  # not 101 + 61 + 61


def test_nobody_needs_nothing() -> None:
    assert forecast().peak() == 0.0


def test_one_more_counts_without_being_entered() -> None:
    books = forecast((10, 2))
    assert books.peak_with(4, 4, 6) == 18
    assert books.peak() == 12


def test_blocks_that_sequences_share_count_once() -> None:
    """Two of 10 tokens that share 8 of their blocks."""
    books = PoolForecast(np.array([10, 10]), np.array([10, 10]), np.array([0, 0]), block_size=1, num_used=12)
    assert books.peak() == 12


def test_the_peak_is_never_below_what_a_simulation_needs() -> None:
    chance = Random(3)
    for _ in range(200):
        size = chance.choice([1, 4, 16])
        sequences = [(chance.randint(1, 60), chance.randint(0, 40)) for _ in range(chance.randint(1, 8))]
        needs = [
            sum(-(-(tokens + step) // size) for tokens, steps in sequences if steps >= step)
            for step in range(41)
        ]
        peak = forecast(*sequences, block_size=size).peak()
        assert max(needs) <= peak + 1e-9
        assert peak <= max(needs) + len(sequences)
