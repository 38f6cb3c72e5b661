import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_scheduler.chunking import CutRules, chunk_length
from tests.shared_scheduler.histories import examples

TEXT, START, PAD = 1, 8, 9


def tokens(text: str) -> np.ndarray:
    """`.` is text, `<` the image's start marker, `#` a pad."""
    return np.array([{".": TEXT, "<": START, "#": PAD}[letter] for letter in text], np.int32)


def rules(**changes: object) -> CutRules:
    return CutRules(image_pad=PAD, image_start=START, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("room", "length"), [(20, 10), (10, 10), (9, 9), (1, 1), (0, 0)])
def test_a_chunk_is_what_fits(room: int, length: int) -> None:
    assert chunk_length(tokens("." * 10), 0, room, rules()) == length


def test_without_chunks_a_prompt_waits_until_it_fits_whole() -> None:
    assert chunk_length(tokens("." * 10), 0, 9, rules(may_cut=False)) == 0
    assert chunk_length(tokens("." * 10), 0, 10, rules(may_cut=False)) == 10


def test_cuts_are_aligned_but_the_last_piece_is_not() -> None:
    assert chunk_length(tokens("." * 10), 0, 9, rules(alignment=4)) == 8
    assert chunk_length(tokens("." * 10), 8, 9, rules(alignment=4)) == 2
    assert chunk_length(tokens("." * 10), 0, 3, rules(alignment=4)) == 0


def test_a_piece_that_needs_the_unaligned_rest_of_the_room_waits() -> None:
    assert chunk_length(tokens("." * 10), 4, 7, rules(alignment=4)) == 4


def test_a_checkpoint_inside_the_chunk_cuts_it() -> None:
    assert chunk_length(tokens("." * 10), 2, 20, rules(), checkpoint=6) == 4
    assert chunk_length(tokens("." * 10), 2, 3, rules(), checkpoint=6) == 3
    assert chunk_length(tokens("." * 10), 2, 20, rules(), checkpoint=10) == 8


def test_a_checkpoint_closer_than_the_shortest_chunk_is_passed_over() -> None:
    assert chunk_length(tokens("." * 10), 0, 20, rules(min_chunk=4), checkpoint=3) == 10


def test_a_checkpoint_is_rounded_to_the_alignment_down_unless_nothing_is_left() -> None:
    assert chunk_length(tokens("." * 10), 0, 20, rules(alignment=4), checkpoint=7) == 4
    assert chunk_length(tokens("." * 10), 0, 20, rules(alignment=4), checkpoint=3) == 4


def test_a_short_chunk_waits_for_the_next_step() -> None:
    assert chunk_length(tokens("." * 10), 0, 3, rules(min_chunk=4)) == 0


def test_a_short_last_piece_runs_all_the_same() -> None:
    assert chunk_length(tokens("." * 10), 8, 5, rules(min_chunk=4)) == 2


@pytest.mark.parametrize("room", [3, 4, 5, 6])
def test_a_cut_inside_an_image_moves_before_its_start_marker(room: int) -> None:
    assert chunk_length(tokens("..<####.."), 0, room, rules()) == 2


def test_a_cut_behind_an_image_stays() -> None:
    assert chunk_length(tokens("..<####.."), 0, 7, rules()) == 7


def test_a_checkpoint_inside_an_image_moves_before_it() -> None:
    assert chunk_length(tokens("..<####..."), 0, 20, rules(), checkpoint=5) == 2


def test_a_checkpoint_inside_the_first_image_moves_behind_it_if_that_fits() -> None:
    assert chunk_length(tokens("<####....."), 0, 9, rules(), checkpoint=3) == 5
    assert chunk_length(tokens("..<####..."), 0, 9, rules(min_chunk=4), checkpoint=5) == 7
    assert chunk_length(tokens("<####....."), 0, 4, rules(), checkpoint=3) == 0


def test_the_end_of_an_image_is_rounded_up_to_the_alignment() -> None:
    assert chunk_length(tokens("<###......"), 0, 8, rules(alignment=3), checkpoint=2) == 6


def test_an_image_larger_than_the_room_waits() -> None:
    assert chunk_length(tokens("<" + "#" * 9 + "."), 0, 6, rules()) == 0


def test_two_images_in_a_row_are_parted_at_the_marker() -> None:
    assert chunk_length(tokens(".<##<##."), 0, 6, rules()) == 4


def test_pads_without_a_marker_are_kept_together_too() -> None:
    assert chunk_length(tokens("..###.."), 0, 4, rules()) == 2


@examples(300)
@given(
    st.text(alphabet=".<#", min_size=1, max_size=40),
    st.integers(1, 40),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 6),
    st.sampled_from([None, 3, 8, 17]),
)
def test_chunks_follow_the_rules_until_the_prompt_is_done(
    text: str, room: int, alignment: int, min_chunk: int, checkpoint: int | None
) -> None:
    ids = tokens(text)
    cut_rules = rules(alignment=alignment, min_chunk=min_chunk)
    start = 0
    while start < len(ids):
        ahead = None if checkpoint is None or checkpoint <= start else checkpoint
        length = chunk_length(ids, start, room, cut_rules, ahead)
        if length == 0:
            return  # an image, or alignment, that this room can never hold
        assert length <= room
        start += length
        if start < len(ids):
            assert length % alignment == 0
            assert length >= min_chunk
            assert not (ids[start] == PAD and ids[start - 1] in (PAD, START))
    assert start == len(ids)
