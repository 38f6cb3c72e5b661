"""What share of its remaining limit a sequence is expected to generate."""

import pytest

from shared_scheduler.new_token_ratio import NewTokenRatio


def test_it_falls_from_one_to_the_floor_in_so_many_decode_steps() -> None:
    ratio = NewTokenRatio(floor=0.2, decay_steps=4)
    seen = [ratio.value]
    for _ in range(5):
        ratio.decode_step()
        seen.append(ratio.value)
    assert seen == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_a_retraction_raises_it_to_generated_by_limit() -> None:
    ratio = NewTokenRatio(floor=0.1, decay_steps=1)
    ratio.decode_step()
    ratio.retracted([(30, 100), (10, 200)])
    assert ratio.value == pytest.approx((30 + 20 + 10 + 20) / 300)


def test_a_retraction_never_lowers_it_nor_lifts_it_above_one() -> None:
    ratio = NewTokenRatio(floor=0.1, decay_steps=10)
    ratio.retracted([(0, 1000)])
    assert ratio.value == 1.0
    ratio.retracted([(99, 100)])
    assert ratio.value == 1.0


def test_the_floor_is_what_a_sequence_met_at_a_random_step_still_generated() -> None:
    """100 of 400: it had 50 tokens before it on average, of 350 that it was allowed."""
    ratio = NewTokenRatio(floor=0.05, decay_steps=1)
    ratio.ended(100, 400)
    assert ratio.floor == pytest.approx(50 / 350)
    ratio.decode_step()
    assert ratio.value == pytest.approx(50 / 350)


def test_the_configured_floor_stands_below_what_was_seen() -> None:
    ratio = NewTokenRatio(floor=0.5, decay_steps=1)
    ratio.ended(1, 1000)
    assert ratio.floor == 0.5


def test_sequences_that_use_their_whole_limit_leave_no_doubt() -> None:
    ratio = NewTokenRatio(floor=0.1, decay_steps=1)
    for length in (10, 50, 200):
        ratio.ended(length, length)
    assert ratio.floor == pytest.approx(1.0)
    assert ratio.spread == pytest.approx(0.0, abs=1e-9)


def test_answers_of_different_length_under_one_limit_spread() -> None:
    """400 of 1,000 show 1/4: after g tokens that errs by 150 - 3/4 g, whose square is 7,500 on average."""
    ratio = NewTokenRatio(floor=0.05, decay_steps=1)
    ratio.ended(400, 1000)
    assert ratio.spread == pytest.approx(7500**0.5)


def test_short_answers_under_a_huge_limit_are_no_spread() -> None:
    """The floor expects more than comes: that is room enough, and nothing is kept free on top of it."""
    ratio = NewTokenRatio(floor=0.1, decay_steps=1)
    for _ in range(50):
        ratio.ended(200, 32_000)
    assert ratio.floor == 0.1
    assert ratio.spread < 200
